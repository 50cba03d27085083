/* dockyard-init launch ... -- PROGRAM ARGS   joins cgroups, mounts the sandbox root, becomes PROGRAM
 * dockyard-init init CONTROL_FD ID ...       pid 1 of a sandbox
 * dockyard-init copy FROM TO IDS IDS LIMIT PARENT   copies a writable layer */
#include "launch.h"

int main(int argc, char **argv) {
    if (argc >= 2 && !strcmp(argv[1], "launch")) return launch(argc - 2, argv + 2);
    if (argc >= 2 && !strcmp(argv[1], "init")) return run_init(argc - 2, argv + 2);
    if (argc >= 2 && !strcmp(argv[1], "copy")) return copy_between(argc - 2, argv + 2);
    fprintf(stderr, "dockyard-init: expected 'launch', 'init' or 'copy' as the first argument\n");
    return 125;
}
