/* The guest's first program, in its initramfs: loads the modules that lie beside it, in the order of their
 * names, mounts the root from the first virtio disk, and hands over to its /start. Static: nothing else is there. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    sleep(1);
    exit(1); /* the kernel panics, which ends the machine */
}

static int is_module(const struct dirent *entry) {
    return strstr(entry->d_name, ".ko") != NULL;
}

int main(void) {
    struct dirent **modules;
    int count = scandir("/modules", &modules, is_module, alphasort);
    if (count < 0 || chdir("/modules")) fail("modules");
    for (int i = 0; i < count; i++) {
        int fd = open(modules[i]->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || syscall(SYS_finit_module, fd, "", 0)) fail(modules[i]->d_name);
    }
    mkdir("/dev", 0755), mkdir("/root", 0755);
    if (mount("devtmpfs", "/dev", "devtmpfs", 0, NULL)) fail("mount /dev");
    for (int tries = 0; mount("/dev/vda", "/root", "ext4", 0, NULL); tries++) {
        if (tries == 100) fail("mount /dev/vda");
        usleep(50000);
    }
    if (mount("/dev", "/root/dev", NULL, MS_MOVE, NULL)) fail("move /dev");
    if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) fail("change root");
    execl("/start", "/start", NULL);
    fail("/start");
}
