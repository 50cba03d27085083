/* The node's guard of sandboxes, at hooks of the kernel's security modules.
 *
 * A sandbox is known by its cgroup and is sealed when its first process is ready: before that the launcher
 * mounts and makes namespaces in the same group. From then on nothing in the group, or in one below it, uses
 * BPF, mounts, makes a user namespace, has the kernel load a module, or traces or signals anything that is not
 * of the same sandbox. It refuses and never allows: what other modules refuse stays refused.
 *
 * Of the kernel's own structures only the fields below are read; libbpf finds where the running kernel has them. */
#include <linux/bpf.h>
#include <stddef.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

enum { MAX_SANDBOXES = 16384, MAX_DEPTH = 16, REFUSED = -1 /* EPERM */ };
/* What was tried; node.py has the same order. */
enum deed { BPF, TRACE, SIGNAL, MOUNT, NAMESPACES, MODULE, NUM_DEEDS };

#define READ_BY_NAME __attribute__((preserve_access_index))

struct kernfs_node {
    __u64 id;
} READ_BY_NAME;

struct cgroup {
    struct kernfs_node *kn;
    int level;
    struct cgroup *ancestors[1]; /* from the root's to its own */
} READ_BY_NAME;

struct css_set {
    struct cgroup *dfl_cgrp;
} READ_BY_NAME;

struct task_struct {
    struct css_set *cgroups;
} READ_BY_NAME;

struct counters {
    __u64 refused[NUM_DEEDS];
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_SANDBOXES);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u64); /* id of the sandbox's version 2 cgroup */
    __type(value, struct counters);
} sealed SEC(".maps");

/* The sandbox's cgroup; 0 for everything else. */
static __always_inline __u64 sandbox_of(const struct task_struct *task) {
    struct cgroup *group = BPF_CORE_READ(task, cgroups, dfl_cgrp);
    int depth = BPF_CORE_READ(group, level);
    const char *ancestors = (const char *)group + bpf_core_field_offset(struct cgroup, ancestors);
    for (int level = 0; level < MAX_DEPTH; level++) {
        const struct cgroup *each = NULL;
        if (level > depth) break;
        if (bpf_probe_read_kernel(&each, sizeof each, ancestors + level * sizeof each)) break;
        __u64 id = BPF_CORE_READ(each, kn, id);
        if (bpf_map_lookup_elem(&sealed, &id)) return id;
    }
    return 0;
}

static __always_inline int refuse(__u64 sandbox, enum deed deed) {
    struct counters *counters = bpf_map_lookup_elem(&sealed, &sandbox);
    if (counters) __sync_fetch_and_add(&counters->refused[deed], 1);
    return REFUSED;
}

static __always_inline int refuse_in_sandboxes(enum deed deed) {
    __u64 sandbox = sandbox_of(bpf_get_current_task_btf());
    return sandbox ? refuse(sandbox, deed) : 0;
}

static __always_inline int refuse_across(const struct task_struct *target, enum deed deed) {
    __u64 sandbox = sandbox_of(bpf_get_current_task_btf());
    return sandbox && sandbox_of(target) != sandbox ? refuse(sandbox, deed) : 0;
}

/* A program gets the hook's own arguments, and is not asked where another has refused before it. */
#define HOOK(name) SEC("lsm/" #name) int name(__attribute__((unused)) __u64 *arguments)

HOOK(bpf) { return refuse_in_sandboxes(BPF); }
HOOK(sb_mount) { return refuse_in_sandboxes(MOUNT); }
HOOK(move_mount) { return refuse_in_sandboxes(MOUNT); }
HOOK(sb_pivotroot) { return refuse_in_sandboxes(MOUNT); }
HOOK(userns_create) { return refuse_in_sandboxes(NAMESPACES); }
HOOK(kernel_module_request) { return refuse_in_sandboxes(MODULE); }
HOOK(ptrace_access_check) { return refuse_across((const struct task_struct *)arguments[0], TRACE); }
HOOK(task_kill) { return refuse_across((const struct task_struct *)arguments[0], SIGNAL); }

char LICENSE[] SEC("license") = "Dual BSD/GPL";
