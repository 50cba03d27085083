"""Sandboxes where version 2 is the only cgroup tree."""


def test_a_command_runs_and_every_limit_holds(create):
    box = create(memory_mb=64, pids=32, cpu=1)
    assert box.info.limits.degraded == ()
    assert box.commands.run("echo $((6 * 7))").stdout == "42\n"


def test_memory_is_bounded(create):
    box = create(memory_mb=64)
    result = box.commands.run(["python3", "-c", "x = bytearray(512 << 20)"], timeout_s=120)
    assert result.reason == "oom"
    assert "memory" in {denial.limit for denial in result.denials}


def test_processes_are_bounded(create):
    box = create(pids=24)
    script = "for i in $(seq 64); do sleep 5 & done; wait"
    result = box.commands.run(script, timeout_s=120)
    assert "pids" in {denial.limit for denial in result.denials}


def test_it_pauses_and_goes_on(create):
    box = create()
    command = box.commands.start("read -r x; echo $x", stdin=None)
    box.pause()
    command.send_stdin("on\n")
    assert command.wait(60).stdout == "on\n"
