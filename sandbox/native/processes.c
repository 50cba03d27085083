#include "dockyard.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PROCESSES = 32768, MAX_PID = 1 << 22, MAX_ROUNDS = 2000 };

struct process {
    pid_t pid, parent;
    char state;
    int num_threads;
};

enum reading { READ_WHOLE, READ_GONE, READ_FAILED };

static struct process table[MAX_PROCESSES]; /* ascending pids, the order in which /proc lists them */
static size_t num_processes;

static enum reading read_process(int proc, const char *name, struct process *process) {
    char path[64], text[512];
    snprintf(path, sizeof path, "%.20s/stat", name);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT || errno == ESRCH ? READ_GONE : READ_FAILED;
    ssize_t length = read(fd, text, sizeof text - 1);
    int reason = errno;
    close(fd);
    if (length <= 0) return length == 0 || reason == ESRCH ? READ_GONE : READ_FAILED;
    text[length] = 0;
    const char *after_name = strrchr(text, ')'); /* the name is the process's own text, brackets and all */
    process->pid = atoi(name);
    /* state, parent; the number of threads is 15 fields further on */
    const char *fields = " %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d";
    bool whole = after_name && sscanf(after_name + 1, fields, &process->state, &process->parent,
                                      &process->num_threads) == 3;
    return whole ? READ_WHOLE : READ_FAILED;
}

/* False when it may have missed a process: no descriptor or memory is free, or the table is full. */
static bool scan(void) {
    num_processes = 0;
    DIR *directory = opendir("/proc");
    if (!directory) return false;
    bool whole = true;
    for (struct dirent *entry; num_processes < MAX_PROCESSES && (errno = 0, entry = readdir(directory));) {
        if (!isdigit((unsigned char)*entry->d_name)) continue;
        enum reading reading = read_process(dirfd(directory), entry->d_name, &table[num_processes]);
        num_processes += reading == READ_WHOLE;
        whole = whole && reading != READ_FAILED;
    }
    whole = whole && num_processes < MAX_PROCESSES && errno == 0;
    closedir(directory);
    return whole;
}

static const struct process *find(pid_t pid) {
    size_t low = 0, high = num_processes;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table[middle].pid < pid) low = middle + 1;
        else high = middle;
    }
    return low < num_processes && table[low].pid == pid ? &table[low] : NULL;
}

static bool is_spared(pid_t pid, const pid_t *spared, size_t num_spared) {
    for (size_t i = 0; i < num_spared; i++)
        if (spared[i] == pid) return true;
    return false;
}

/* A process whose first thread has exited is a zombie to look at, while its other threads run on. */
static bool is_dead(const struct process *process) {
    return process->state == 'Z' && process->num_threads <= 1;
}

static bool is_prey(const struct process *process, pid_t root, const pid_t *spared, size_t num_spared) {
    if (process->pid == root || is_dead(process)) return false;
    for (size_t depth = 0; process && depth < num_processes; depth++) {
        if (is_spared(process->pid, spared, num_spared)) return false;
        if (process->parent == root) return true;
        process = find(process->parent);
    }
    return false;
}

/* Sends `signal` to every descendant; `seen` (a bit a pid) skips those that have had it. 0 only when it is
 * certain that there was none. */
static size_t signal_descendants(pid_t root, int signal, const pid_t *spared, size_t num_spared, uint8_t *seen) {
    size_t num_new = scan() ? 0 : 1;
    for (size_t i = 0; i < num_processes; i++) {
        pid_t pid = table[i].pid;
        if (!is_prey(&table[i], root, spared, num_spared)) continue;
        if (seen && pid < MAX_PID) {
            if (seen[pid / 8] & (1 << pid % 8)) continue;
            seen[pid / 8] |= (uint8_t)(1 << pid % 8);
        }
        kill(pid, signal);
        num_new++;
    }
    return num_new;
}

static void reap(const pid_t *spared, size_t num_spared) {
    siginfo_t info = {0};
    for (size_t i = 0; i < num_processes; i++) /* by pid: the spared ones are the caller's to reap */
        if (!is_spared(table[i].pid, spared, num_spared)) waitid(P_PID, (id_t)table[i].pid, &info, WEXITED | WNOHANG);
}

/* Stops all before killing any. A stopped process keeps its place under the pids limit, so a fork bomb runs
 * out of places and the first loop ends; killing straight away would free places for it to grow back into.
 * False when some may be left: they do not die, or for seconds on end nobody could look. */
bool kill_descendants(pid_t root, const pid_t *spared, size_t num_spared) {
    static uint8_t seen[MAX_PID / 8];
    size_t num_first = signal_descendants(root, SIGSTOP, spared, num_spared, NULL);
    if (!num_first) return true; /* the usual end of a command; nothing of `seen` is touched */
    memset(seen, 0, sizeof seen);
    for (int round = 0; round < MAX_ROUNDS; round++)
        if (!signal_descendants(root, SIGSTOP, spared, num_spared, seen)) break;
    for (int round = 0; round < MAX_ROUNDS; round++) {
        size_t num_left = signal_descendants(root, SIGKILL, spared, num_spared, NULL);
        reap(spared, num_spared);
        if (!num_left) return true;
        nanosleep(&(struct timespec){.tv_nsec = round < 20 ? 100000 : 2000000}, NULL);
    }
    return false;
}
