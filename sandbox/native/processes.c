#include "dockyard.h"

#include <time.h>

enum { MAX_PROCESSES = 32768, MAX_PID = 1 << 22, MAX_ROUNDS = 2000 };
enum mark { SPARED = 1, PREY = 2, STOPPED = 4 }; /* the first two are of one look, the third of the whole hunt */

static struct {
    pid_t pid, parent;
} table[MAX_PROCESSES];
static size_t num_processes;
static uint8_t marks[MAX_PID];
static pid_t highest; /* pid with a mark */

/* 0 when the process is gone, -1 where one cannot look. */
static pid_t read_parent(int proc, const char *name) {
    char path[64], text[512];
    snprintf(path, sizeof path, "%.20s/stat", name);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    int reason = errno;
    if (fd >= 0) close(fd);
    if (length <= 0) return length == 0 || reason == ENOENT || reason == ESRCH ? 0 : -1;
    text[length] = 0;
    pid_t parent;
    const char *after_name = strrchr(text, ')'); /* the name is the process's own text, brackets and all */
    return after_name && sscanf(after_name + 1, " %*c %d", &parent) == 1 ? parent : -1;
}

/* False when it may have missed a process: no descriptor or memory is free, or the table is full. */
static bool scan(void) {
    num_processes = 0;
    DIR *directory = opendir("/proc");
    if (!directory) return false;
    bool whole = true;
    for (struct dirent *entry; num_processes < MAX_PROCESSES && (errno = 0, entry = readdir(directory));) {
        pid_t pid = atoi(entry->d_name), parent = pid > 0 ? read_parent(dirfd(directory), entry->d_name) : 0;
        if (parent < 0) whole = false;
        if (parent <= 0 || pid >= MAX_PID) continue;
        table[num_processes].pid = pid, table[num_processes++].parent = parent;
        if (pid > highest) highest = pid;
    }
    whole = whole && num_processes < MAX_PROCESSES && errno == 0;
    closedir(directory);
    return whole;
}

/* A parent's pid may be the higher one, hence more than one pass. */
static void mark_prey(pid_t root, const pid_t *spared, size_t num_spared) {
    for (size_t i = 0; i < num_spared; i++) marks[spared[i]] |= SPARED;
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < num_processes; i++) {
            uint8_t *mark = &marks[table[i].pid];
            if (*mark & (SPARED | PREY)) continue;
            if (table[i].parent == root || marks[table[i].parent] & PREY) *mark |= PREY, changed = true;
        }
    }
    for (size_t i = 0; i < num_spared; i++) marks[spared[i]] &= ~SPARED;
}

/* Sends it to every descendant, SIGSTOP once to each, and reaps. 0 only when it is certain that there was none. */
static size_t signal_descendants(int signal, pid_t root, const pid_t *spared, size_t num_spared) {
    siginfo_t info;
    size_t num_found = scan() ? 0 : 1;
    mark_prey(root, spared, num_spared);
    for (size_t i = 0; i < num_processes; i++) {
        uint8_t *mark = &marks[table[i].pid];
        bool is_due = *mark & PREY && !(signal == SIGSTOP && *mark & STOPPED);
        *mark = is_due && signal == SIGSTOP ? STOPPED : *mark & STOPPED;
        if (!is_due) continue;
        kill(table[i].pid, signal);
        waitid(P_PID, (id_t)table[i].pid, &info, WEXITED | WNOHANG | __WALL);
        num_found++;
    }
    return num_found;
}

/* Stops all before killing any. A stopped process keeps its place under the pids limit, so a fork bomb runs
 * out of places and the first loop ends; killing straight away would free places for it to grow back into.
 * False when some may be left: they do not die, or for seconds on end nobody could look. */
bool kill_descendants(pid_t root, const pid_t *spared, size_t num_spared) {
    memset(marks, 0, (size_t)highest + 1);
    for (int round = 0; round < MAX_ROUNDS; round++)
        if (!signal_descendants(SIGSTOP, root, spared, num_spared)) break;
    for (int round = 0; round < MAX_ROUNDS; round++) {
        if (!signal_descendants(SIGKILL, root, spared, num_spared)) return true;
        nanosleep(&(struct timespec){.tv_nsec = round < 20 ? 100000 : 2000000}, NULL);
    }
    return false;
}
