/* dockyard-init: the one native program of a sandbox. Two modes, see main.c.
 *
 * Wire (host end: sandbox/wire.py). A frame is a header of three native u32 (payload length, id, kind) and
 * the payload. Ids are chosen by the host; replies carry the id of their request. Integers are native order:
 * both ends run on one machine. */
#ifndef DOCKYARD_H
#define DOCKYARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { WIRE_VERSION = 2, MAX_PAYLOAD = (1 << 20) + 8192, CHUNK = 1 << 16, MAX_COMMANDS = 64 };

enum frame_kind {
    /* host to init */
    EXEC = 1,   /* struct exec_header; then NUL-ended cwd, argv, environment */
    STDIN = 2,  /* bytes; none = end of input. Only in answer to STDIN_WANT */
    KILL = 3,   /* end a command and all its descendants */
    READ = 4,   /* u64 offset, u32 count; path. DATA, DONE */
    WRITE = 5,  /* u32 flags, u32 mode; path, NUL, bytes. DONE */
    LIST = 6,   /* path. ENTRY..., DONE */
    STAT = 7,   /* path. ENTRY, DONE */
    MKDIR = 8,  /* path, parents too. DONE */
    REMOVE = 9, /* path, whole trees too. DONE */
    RESIZE = 10, /* u16 rows, u16 columns: of a command's terminal */
    /* init to host */
    HELLO = 64, /* u32 wire version */
    STDOUT = 65,
    STDERR = 66,
    STDIN_WANT = 67,
    EXIT = 68,  /* u32 enum ending, u32 value */
    DATA = 69,
    ENTRY = 70, /* struct entry, name, NUL, link target */
    DONE = 71,  /* u32 errno, 0 = success; above 1000 an enum trouble */
};

enum exec_flag { EXEC_STDIN = 1, EXEC_TERMINAL = 2 };
enum write_flag { WRITE_TRUNCATE = 1, WRITE_PARENTS = 2 };
enum ending { ENDED_EXIT = 0, ENDED_SIGNAL = 1, FAILED_CHDIR = 2, FAILED_EXEC = 3, FAILED_START = 4, MINDER_DIED = 5 };
enum trouble { NOT_REGULAR = 1001, TOO_DEEP = 1002, BAD_FRAME = 1003 };

struct frame {
    uint32_t length, id, kind;
    char *payload;
};

struct status {
    uint32_t ending, value;
};

struct exec_header {
    uint32_t flags, argc, envc;
    uint32_t size; /* of the terminal: u16 rows, u16 columns */
};

/* wire.c */
void send_frame(int socket, uint32_t id, uint32_t kind, const void *data, size_t length);
void send_done(int socket, uint32_t id, uint32_t error);

/* processes.c: both walk /proc and work on any number of descendants, forking ones included */
bool kill_descendants(pid_t root, const pid_t *spared, size_t num_spared);

/* command.c */
struct limits {
    uint64_t processes, data_bytes; /* 0 = none */
};
void run_minder(const struct frame *exec, int in, int out, int err, int status, const struct limits *limits);
bool exec_frame_is_sound(const struct frame *frame);

/* terminal.c */
bool open_terminal(uint32_t size, int *master, int *slave);
void resize_terminal(int master, uint32_t size);

/* files.c */
void serve_file(int socket, const struct frame *frame);

/* landlock.c: writes beneath these places, and to devices, and nowhere else; for good. Ends the process with a
 * message when it cannot */
void restrict_writes(char **places, int count);

/* namespaces.c, for launch: each ends the process with a message when it cannot */
void fail(const char *format, ...);
void write_text(const char *path, const char *text);
void start_loopback(void);
void lower_limits(void);
void lower_counts(void);
void drop_to(uid_t uid);
void make_user_namespace(const char *place, uid_t owner, uid_t num_ids);

/* copy.c, for launch and by itself */
void copy_layer(int from, int to, uint32_t first_from, uint32_t first_to, uint64_t limit);

/* the modes */
int launch(int argc, char **argv);
int copy_between(int argc, char **argv);
int run_init(int argc, char **argv);

#endif
