/* What the modes launch and copy are made of. */
#ifndef LAUNCH_H
#define LAUNCH_H

#include "dockyard.h"

/* namespaces.c: each ends the process with a message when it cannot */
void start_loopback(void);
/* Umask and signals as a process of nobody's has them: ignored and blocked ones come down from an owner */
void begin_anew(void);
/* Limits, processors and priority that the process `owner` has now, as far as we may */
void follow(pid_t owner);
void lower_limits(void);
void lower_counts(void);
void map_own_id(uid_t uid, gid_t gid);
/* Asks the owner for ids, and waits; with `linked`, hands over a socket for a resolver */
void await_adoption(int adopter, bool linked);
/* And again for what takes longer: a cgroup, a link */
void await_word(int adopter);
void drop_to(uid_t uid);

struct order {
    bool network;  /* one with nothing but a loopback */
    bool within;   /* a user namespace of ours already */
    uid_t owner;   /* of the user namespace */
    uid_t num_ids; /* in it; 0 = none is to be made */
};
struct maker {
    pid_t pid; /* 0 = there is nothing to make */
    int ready, finished;
};
struct maker start_maker(const struct order *order);
/* Waits for it, enters the network and keeps the user namespace at `place` */
void take_namespaces(const struct maker *maker, const char *place, const struct order *order);

/* copy.c, for launch and by itself */
void copy_layer(int from, int to, uint32_t first_from, uint32_t first_to, uint64_t limit);

/* Who started this launch: NULL = a program of its own, whose options name descriptors by their numbers */
struct origin {
    int reports; /* where the layer's content is handed in, when nothing here stays */
    uint32_t ticket;
    const int *fds; /* what options name by their place in here */
};
int launch(int argc, char **argv, const struct origin *origin);
int nursery(int argc, char **argv);
int copy_between(int argc, char **argv);

#endif
