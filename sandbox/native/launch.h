/* What the modes launch and copy are made of. */
#ifndef LAUNCH_H
#define LAUNCH_H

#include "dockyard.h"

/* namespaces.c: each ends the process with a message when it cannot */
void start_loopback(void);
void lower_limits(void);
void lower_counts(void);
void drop_to(uid_t uid);
void make_user_namespace(const char *place, uid_t owner, uid_t num_ids);

/* copy.c, for launch and by itself */
void copy_layer(int from, int to, uint32_t first_from, uint32_t first_to, uint64_t limit);

int launch(int argc, char **argv);
int copy_between(int argc, char **argv);

#endif
