/* Modes: `nursery`, parent of an owner's sandboxes; `launch`, which mounts a root and becomes a program; `init`, pid 1
 * of a sandbox; `copy`, of a writable layer. What each takes is said where it is. */
#include "launch.h"

int main(int argc, char **argv) {
    if (argc >= 2 && !strcmp(argv[1], "launch")) return launch(argc - 2, argv + 2, NULL);
    if (argc >= 2 && !strcmp(argv[1], "nursery")) return nursery(argc - 2, argv + 2);
    if (argc >= 2 && !strcmp(argv[1], "init")) return run_init(argc - 2, argv + 2);
    if (argc >= 2 && !strcmp(argv[1], "copy")) return copy_between(argc - 2, argv + 2);
    fprintf(stderr, "dockyard-init: expected 'nursery', 'launch', 'init' or 'copy' as the first argument\n");
    return 125;
}
