/* One command. Init forks a minder for it, the minder forks the program.
 *
 * The minder is the "child subreaper" of everything that the program starts: a process that daemonises is
 * handed to the minder, not to init, so the minder knows all of the command's processes, however they try to
 * leave. The rule: when the program ends, or when it is told to, the minder kills every one that is left and
 * only then reports. Nothing outlives its command. */
#define _GNU_SOURCE
#include "dockyard.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

bool exec_frame_is_sound(const struct frame *frame) {
    struct exec_header header;
    if (frame->length < sizeof header) return false;
    memcpy(&header, frame->payload, sizeof header);
    size_t num_strings = 0;
    for (size_t i = sizeof header; i < frame->length; i++) num_strings += frame->payload[i] == 0;
    return header.argc > 0 && frame->payload[frame->length - 1] == 0 &&
           num_strings == 1 + (size_t)header.argc + header.envc;
}

static char **take_strings(char **cursor, uint32_t count) {
    char **strings = calloc((size_t)count + 1, sizeof *strings);
    for (uint32_t i = 0; strings && i < count; i++) {
        strings[i] = *cursor;
        *cursor += strlen(*cursor) + 1;
    }
    return strings;
}

static void report(int status, uint32_t ending, int value) {
    struct status message = {ending, (uint32_t)value};
    ssize_t written = write(status, &message, sizeof message);
    (void)written; /* init is gone: so are we */
}

static void become_program(const struct frame *exec, int in, int out, int err, int status, const struct limits *limits) {
    struct exec_header header;
    memcpy(&header, exec->payload, sizeof header);
    char *cursor = exec->payload + sizeof header, *cwd = cursor;
    cursor += strlen(cwd) + 1;
    char **argv = take_strings(&cursor, header.argc), **environment = take_strings(&cursor, header.envc);
    sigset_t none;
    sigemptyset(&none);
    setsid();
    if (limits->data_bytes)
        setrlimit(RLIMIT_DATA, &(struct rlimit){limits->data_bytes, limits->data_bytes});
    if (!argv || !environment || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) {
        report(status, FAILED_START, errno);
        _exit(127);
    }
    if (header.flags & EXEC_TERMINAL) ioctl(0, TIOCSCTTY, 0);
    if (chdir(cwd)) {
        report(status, FAILED_CHDIR, errno);
        _exit(127);
    }
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL); /* an owner in the background ignores some */
    sigprocmask(SIG_SETMASK, &none, NULL);
    environ = environment;
    execvp(argv[0], argv);
    report(status, FAILED_EXEC, errno);
    _exit(127);
}

/* The program's wait status; that of a killed one when init says (SIGTERM) that it is to end. */
static int wait_for_program(pid_t program) {
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    for (int wait_status;;) {
        for (pid_t ended; (ended = waitpid(-1, &wait_status, WNOHANG)) > 0;)
            if (ended == program) return wait_status;
        if (sigwaitinfo(&awaited, NULL) == SIGTERM) return SIGKILL;
    }
}

void run_minder(const struct frame *exec, int in, int out, int err, int status, const struct limits *limits) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t program = fork();
    if (program == 0) become_program(exec, in, out, err, status, limits);
    if (program < 0) {
        report(status, FAILED_START, errno);
        _exit(0);
    }
    close(in), close(out), close(err);
    int wait_status = wait_for_program(program);
    if (!kill_descendants(getpid(), NULL, 0)) _exit(1); /* init sees a minder without a report, and acts */
    if (WIFSIGNALED(wait_status)) report(status, ENDED_SIGNAL, WTERMSIG(wait_status));
    else report(status, ENDED_EXIT, WEXITSTATUS(wait_status));
    _exit(0);
}
