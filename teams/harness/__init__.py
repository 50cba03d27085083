"""Ways to run a team: live by chatting, replayed from a recording, or by sampling programs."""
