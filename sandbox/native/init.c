/* Pid 1 of a sandbox: one loop over the control socket, the commands' pipes and SIGCHLD.
 *
 * When the control socket closes, the owner is gone: init ends, and the kernel ends everything in its pid
 * namespace. Init and minders are not dumpable, so the sandbox's own processes (same uid) cannot trace them. */
#define _GNU_SOURCE
#include "dockyard.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { IN, OUT, ERR, STATUS, NUM_PIPES };
enum { PIPE_BYTES = 1 << 18, DRAIN_CHUNKS = 16 }; /* a drain takes 1 MiB, the largest pipe there can be */

struct command {
    pid_t minder; /* 0 = free slot */
    uint32_t id;
    int pipes[NUM_PIPES]; /* our ends; -1 = closed */
    char *input;          /* the host's last STDIN, not yet taken by the program */
    size_t input_length, input_taken;
    bool input_wanted; /* asked the host for more, no answer yet */
};

static struct command commands[MAX_COMMANDS];
static struct limits limits;
static int control;
static int own_score; /* of the OOM killer, for this process; opened while it may still be */
static char inbox[12 + MAX_PAYLOAD];
static size_t inbox_used;

static void close_pipe(struct command *command, int which) {
    if (command->pipes[which] >= 0) close(command->pipes[which]);
    command->pipes[which] = -1;
}

static void release(struct command *command) {
    for (int which = 0; which < NUM_PIPES; which++) close_pipe(command, which);
    free(command->input);
    *command = (struct command){0};
}

static struct command *find_command(uint32_t id) {
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].minder && commands[i].id == id) return &commands[i];
    return NULL;
}

static void send_exit(uint32_t id, uint32_t ending, uint32_t value) {
    struct status status = {ending, value};
    send_frame(control, id, EXIT, &status, sizeof status);
}

/* Both ends of the four pipes, a terminal in place of three where there is one; input is /dev/null where the host
 * sends none. */
static bool open_pipes(int ours[NUM_PIPES], int theirs[NUM_PIPES], const struct exec_header *header) {
    for (int which = 0; which < NUM_PIPES; which++) ours[which] = theirs[which] = -1;
    bool terminal = header->flags & EXEC_TERMINAL, with_input = header->flags & EXEC_STDIN;
    if (terminal) {
        if (!open_terminal(header->size, &ours[OUT], &theirs[OUT])) return false;
        theirs[ERR] = fcntl(theirs[OUT], F_DUPFD_CLOEXEC, 0);
        theirs[IN] = fcntl(theirs[OUT], F_DUPFD_CLOEXEC, 0);
        if (with_input) ours[IN] = fcntl(ours[OUT], F_DUPFD_CLOEXEC, 0);
    }
    for (int which = terminal ? STATUS : with_input ? IN : OUT; which < NUM_PIPES; which++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC)) return false;
        ours[which] = ends[which == IN];
        theirs[which] = ends[which != IN];
        fcntl(ours[which], F_SETFL, O_NONBLOCK);
        if (which == OUT) fcntl(ours[which], F_SETPIPE_SZ, PIPE_BYTES); /* fewer switches; may be refused */
    }
    if (!with_input && !terminal) theirs[IN] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return theirs[IN] >= 0 && theirs[ERR] >= 0 && (ours[IN] >= 0 || !with_input);
}

static void close_all(int fds[NUM_PIPES]) {
    for (int which = 0; which < NUM_PIPES; which++)
        if (fds[which] >= 0) close(fds[which]);
}

static void close_inits_own(void) {
    close(control);
    close(own_score);
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].minder) release(&commands[i]);
}

/* The kernel takes a command before it takes init: a command begins with init's score, raised meanwhile. */
static pid_t fork_offered_to_oom_killer(void) {
    ssize_t raised = write(own_score, "500", 3);
    pid_t minder = fork();
    if (minder != 0 && raised == 3) raised = write(own_score, "0", 1);
    return minder;
}

static void start_command(const struct frame *frame) {
    struct exec_header header;
    struct command *command = NULL;
    for (int i = 0; i < MAX_COMMANDS && !command; i++)
        if (!commands[i].minder) command = &commands[i];
    if (!command || !exec_frame_is_sound(frame)) {
        send_exit(frame->id, FAILED_START, command ? BAD_FRAME : EBUSY);
        return;
    }
    memcpy(&header, frame->payload, sizeof header);
    int ours[NUM_PIPES], theirs[NUM_PIPES];
    bool opened = open_pipes(ours, theirs, &header);
    pid_t minder = opened ? fork_offered_to_oom_killer() : -1;
    if (minder == 0) {
        close_inits_own();
        close_all(ours);
        run_minder(frame, theirs[IN], theirs[OUT], theirs[ERR], theirs[STATUS], &limits);
    }
    int reason = errno;
    close_all(theirs);
    if (minder < 0) {
        close_all(ours);
        send_exit(frame->id, FAILED_START, (uint32_t)reason);
        return;
    }
    *command = (struct command){.minder = minder, .id = frame->id};
    memcpy(command->pipes, ours, sizeof ours);
}

static void take_input(const struct frame *frame) {
    struct command *command = find_command(frame->id);
    if (!command || !command->input_wanted) return;
    command->input_wanted = false;
    if (frame->length == 0) {
        close_pipe(command, IN);
        return;
    }
    char *copy = realloc(command->input, frame->length);
    if (!copy) return;
    memcpy(copy, frame->payload, frame->length);
    command->input = copy;
    command->input_length = frame->length;
    command->input_taken = 0;
}

static void resize(const struct frame *frame) {
    struct command *command = find_command(frame->id);
    uint32_t size;
    if (!command || frame->length != sizeof size || command->pipes[OUT] < 0) return;
    memcpy(&size, frame->payload, sizeof size);
    resize_terminal(command->pipes[OUT], size);
}

static void serve(const struct frame *frame) {
    struct command *command;
    switch (frame->kind) {
    case EXEC: start_command(frame); break;
    case STDIN: take_input(frame); break;
    case RESIZE: resize(frame); break;
    case KILL:
        if ((command = find_command(frame->id))) kill(command->minder, SIGTERM);
        break;
    default: serve_file(control, frame);
    }
}

static void read_control(void) {
    ssize_t length = recv(control, inbox + inbox_used, sizeof inbox - inbox_used, MSG_DONTWAIT);
    if (length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR)) _exit(0);
    if (length < 0) return;
    inbox_used += (size_t)length;
    size_t taken = 0;
    while (inbox_used - taken >= 12) {
        uint32_t header[3];
        memcpy(header, inbox + taken, sizeof header);
        if (header[0] > MAX_PAYLOAD) _exit(1);
        if (inbox_used - taken < 12 + (size_t)header[0]) break;
        struct frame frame = {header[0], header[1], header[2], inbox + taken + 12};
        serve(&frame);
        taken += 12 + (size_t)header[0];
    }
    memmove(inbox, inbox + taken, inbox_used - taken);
    inbox_used -= taken;
}

/* One chunk of output to the host; false when there is none now or ever again. */
static bool pump_output(struct command *command, int which) {
    static char chunk[CHUNK];
    if (command->pipes[which] < 0) return false;
    ssize_t length = read(command->pipes[which], chunk, sizeof chunk);
    if (length > 0) send_frame(control, command->id, which == OUT ? STDOUT : STDERR, chunk, (size_t)length);
    else if (length == 0 || (errno != EAGAIN && errno != EINTR)) close_pipe(command, which);
    return length > 0;
}

static void pump_input(struct command *command) {
    size_t left = command->input_length - command->input_taken;
    if (left == 0) {
        if (!command->input_wanted) send_frame(control, command->id, STDIN_WANT, NULL, 0);
        command->input_wanted = true;
        return;
    }
    ssize_t length = write(command->pipes[IN], command->input + command->input_taken, left);
    if (length > 0) command->input_taken += (size_t)length;
    else if (length < 0 && errno != EAGAIN && errno != EINTR) close_pipe(command, IN); /* it reads no more */
}

/* Init's only children are minders; any other process was handed over by a minder that a command managed to
 * kill, so it is a stray and goes. If even that fails, the sandbox as a whole goes. */
static void kill_strays(void) {
    pid_t minders[MAX_COMMANDS];
    size_t num_minders = 0;
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].minder) minders[num_minders++] = commands[i].minder;
    if (!kill_descendants(getpid(), minders, num_minders)) _exit(1);
}

/* The minder has reported: all its processes are dead, what they wrote is in the pipes. */
static void finish(struct command *command) {
    struct status status = {MINDER_DIED, 0};
    ssize_t length = read(command->pipes[STATUS], &status, sizeof status);
    if (length < 0) return;
    if (length == 0) {
        waitpid(command->minder, NULL, 0);
        command->minder = -1; /* spares nobody */
        kill_strays();
    }
    for (int which = OUT; which <= ERR; which++)
        for (int chunk = 0; chunk < DRAIN_CHUNKS && pump_output(command, which); chunk++) {}
    send_exit(command->id, status.ending, status.value);
    release(command);
}

/* Nobody but a command stops a minder, and a stopped one ends nothing: it is killed, so that its command ends
 * as that of a minder does which a command has killed itself. */
static void reap(int signals) {
    struct signalfd_siginfo info;
    int status;
    while (read(signals, &info, sizeof info) > 0) {}
    for (pid_t child; (child = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;)
        if (WIFSTOPPED(status)) kill(child, SIGKILL);
}

static nfds_t fill_polls(struct pollfd *polls, int signals) {
    nfds_t count = 0;
    polls[count++] = (struct pollfd){.fd = control, .events = POLLIN};
    polls[count++] = (struct pollfd){.fd = signals, .events = POLLIN};
    for (int i = 0; i < MAX_COMMANDS; i++) {
        struct command *command = &commands[i];
        if (!command->minder) continue;
        for (int which = 0; which < NUM_PIPES; which++)
            polls[count++] = (struct pollfd){
                .fd = which == IN && command->input_wanted ? -1 : command->pipes[which],
                .events = which == IN ? POLLOUT : POLLIN,
            };
    }
    return count;
}

static void serve_forever(int signals) {
    struct pollfd polls[2 + MAX_COMMANDS * NUM_PIPES];
    for (;;) {
        struct command *polled[MAX_COMMANDS];
        int num_polled = 0;
        for (int i = 0; i < MAX_COMMANDS; i++)
            if (commands[i].minder) polled[num_polled++] = &commands[i];
        if (poll(polls, fill_polls(polls, signals), -1) < 0) continue;
        for (int i = 0; i < num_polled; i++) {
            const struct pollfd *mine = &polls[2 + i * NUM_PIPES];
            if (mine[IN].revents) pump_input(polled[i]);
            if (mine[OUT].revents) pump_output(polled[i], OUT);
            if (mine[ERR].revents) pump_output(polled[i], ERR);
            if (mine[STATUS].revents) finish(polled[i]);
        }
        if (polls[1].revents) reap(signals);
        if (polls[0].revents) read_control();
    }
}

/* For good: nothing that is confined may change to another profile, unless the profile says so. */
static void enter_profile(const char *name) {
    char words[256];
    snprintf(words, sizeof words, "changeprofile %s", name);
    write_text("/proc/self/attr/apparmor/current", words);
}

/* init CONTROL_FD ID MAX_PROCESSES MAX_DATA_BYTES PROFILE [PLACE ...]   0 = no such limit. ID makes the process
 * findable. PROFILE is of AppArmor, - for none. With places, all writes are to be beneath one of them. */
int run_init(int argc, char **argv) {
    if (argc < 5) return 125;
    control = atoi(argv[0]);
    limits = (struct limits){strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10)};
    prctl(PR_SET_DUMPABLE, 0);
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    fcntl(control, F_SETFD, FD_CLOEXEC);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){1024, 1024});
    own_score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (strcmp(argv[4], "-")) enter_profile(argv[4]);
    if (argc > 5) restrict_writes(argv + 5, argc - 5);
    if (limits.processes) setrlimit(RLIMIT_NPROC, &(struct rlimit){limits.processes, limits.processes});
    sigset_t handled;
    sigemptyset(&handled);
    sigaddset(&handled, SIGCHLD);
    sigaddset(&handled, SIGTERM);
    sigprocmask(SIG_BLOCK, &handled, NULL);
    sigdelset(&handled, SIGTERM); /* a minder's to take; blocked before the fork, so that none is lost */
    int signals = signalfd(-1, &handled, SFD_NONBLOCK | SFD_CLOEXEC);
    uint32_t version = WIRE_VERSION;
    send_frame(control, 0, HELLO, &version, sizeof version);
    serve_forever(signals);
    return 0;
}
