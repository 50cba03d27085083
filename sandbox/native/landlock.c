/* Landlock: where a sandbox's processes may write, whatever modes, mounts and owners say. Init restricts
 * itself before it serves anything, so that all commands share one domain: they see and signal each other as
 * processes of one machine do. Nothing takes a restriction back.
 *
 * Source: Documentation/userspace-api/landlock.rst of Linux, by ABI version. */
#include "dockyard.h"

#include <sys/syscall.h>

enum { SYS_CREATE_RULESET = 444, SYS_ADD_RULE = 445, SYS_RESTRICT_SELF = 446 };
enum { VERSION_QUERY = 1, RULE_PATH_BENEATH = 1 };
enum {
    WRITE_FILE = 1 << 1,
    REMOVALS = 1 << 4 | 1 << 5,
    MAKE_DEVICES = 1 << 6 | 1 << 11,
    MAKINGS = 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12,
    REFER = 1 << 13,     /* moves and links between directories; ABI 2 */
    TRUNCATE = 1 << 14,  /* ABI 3 */
    IOCTL_DEV = 1 << 15, /* ABI 5 */
};

struct ruleset_attributes {
    uint64_t handled_access_fs;
};
struct path_rule {
    uint64_t allowed_access;
    int32_t parent;
} __attribute__((packed));

static uint64_t known_rights(long abi) {
    return WRITE_FILE | REMOVALS | MAKE_DEVICES | MAKINGS | (abi >= 2 ? REFER : 0) | (abi >= 3 ? TRUNCATE : 0) |
           (abi >= 5 ? IOCTL_DEV : 0);
}

static void allow(int ruleset, const char *path, uint64_t rights) {
    struct path_rule rule = {rights, open(path, O_PATH | O_CLOEXEC)};
    if (rule.parent < 0) fail("landlock: open %s", path);
    if (syscall(SYS_ADD_RULE, ruleset, RULE_PATH_BENEATH, &rule, 0)) fail("landlock: allow %s", path);
    close(rule.parent);
}

void restrict_writes(char **places, int count) {
    long abi = syscall(SYS_CREATE_RULESET, NULL, 0, VERSION_QUERY);
    if (abi < 1) fail("landlock is not there");
    uint64_t all = known_rights(abi);
    struct ruleset_attributes attributes = {all};
    int ruleset = (int)syscall(SYS_CREATE_RULESET, &attributes, sizeof attributes, 0);
    if (ruleset < 0) fail("landlock: make a ruleset");
    allow(ruleset, "/dev", all & (WRITE_FILE | TRUNCATE | IOCTL_DEV));
    for (int i = 0; i < count; i++) allow(ruleset, places[i], all & ~(uint64_t)(MAKE_DEVICES | IOCTL_DEV));
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_RESTRICT_SELF, ruleset, 0)) fail("landlock: restrict");
    close(ruleset);
}
