/* dockyard-init, the one native program of a sandbox: what its inside mode is made of (launch.h: the other mode).
 *
 * Wire (host end: sandbox/wire.py). Every message is one packet of a SEQPACKET socket: struct message, with a path
 * where there is one, and descriptors. Ids are chosen by the host; replies carry the id of their request. Integers
 * are native order: both ends run on one machine. */
#ifndef DOCKYARD_H
#define DOCKYARD_H
#define _GNU_SOURCE

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WIRE_VERSION = 3, MAX_COMMANDS = 64, MAX_FDS = 5 };

enum kind {
    /* host to init */
    EXEC = 1,   /* first: enum exec_flag, second: u16 rows, u16 columns. Descriptors: struct exec */
    KILL = 2,   /* end a command and all its descendants */
    OPEN = 3,   /* first: flags of open(2); path. DONE, with a descriptor */
    WRITE = 4,  /* first: append or not, second: mode; path, descriptor of the content. DONE */
    MKDIR = 5,  /* path. DONE */
    REMOVE = 6, /* path, whole trees too. DONE; UNFINISHED when it is to be sent again: init serves others too */
    RENAME = 7, /* two paths, a NUL between them. DONE; as rename(2) */
    /* init to host */
    HELLO = 64,    /* first: WIRE_VERSION */
    DONE = 65,     /* first: errno, 0 = success; above 1000 an enum trouble */
    EXIT = 66,     /* first: enum ending, second: value. By the report; by the control socket where nobody reports */
    TERMINAL = 67, /* by the report: descriptor of the terminal's other end */
};

enum exec_flag { EXEC_STDIN = 1, EXEC_TERMINAL = 2 };
enum ending { ENDED_EXIT = 0, ENDED_SIGNAL = 1, FAILED_CHDIR = 2, FAILED_EXEC = 3, FAILED_START = 4, MINDER_DIED = 5 };
enum trouble { NOT_REGULAR = 1001, BAD_MESSAGE = 1003, UNFINISHED = 1004 };

struct message {
    uint32_t id, kind, first, second;
    char path[8192]; /* room for two */
};

/* Descriptors of an EXEC, in the order of the wire. With a terminal the last three are not there, without input
 * the last is not. `words` is a file: u32 number of arguments, u32 of the environment; NUL-ended cwd, both. */
struct exec {
    int words, report, out, err, in;
};

/* wire.c. The socket's end is the caller's end; `fd` travels along, -1 = none. False where it cannot: errno says why */
bool send_message(int socket, uint32_t id, enum kind kind, uint32_t first, uint32_t second, int fd);
/* False when there is none now. What of `fds` is not used is -1 */
bool receive_message(int socket, struct message *message, int fds[MAX_FDS]);

/* processes.c: works on any number of descendants, forking ones included. False when some may be left */
bool kill_descendants(pid_t root, const pid_t *spared, size_t num_spared);

/* command.c. `data_bytes` of each process, 0 = no limit */
void run_minder(const struct message *call, const struct exec *exec, uint64_t data_bytes);

/* files.c: 0, an errno or an enum trouble; `*opened` gets the descriptor that an OPEN asks for */
uint32_t serve_file(const struct message *call, int content, int *opened);

/* landlock.c: writes beneath these places and to devices alone, for good; or ends the process with a message */
void restrict_writes(char **places, int count);

/* failing.c: each ends the process with a message, `write_text` when it cannot */
void fail_as(int status, const char *format, ...);
#define fail(...) fail_as(125, __VA_ARGS__)
void write_text(const char *path, const char *text);

int run_init(int argc, char **argv);

#endif
