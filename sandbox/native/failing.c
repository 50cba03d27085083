/* For both modes: what cannot be done ends the process, with a message. */
#include "dockyard.h"

#include <stdarg.h>

void fail_as(int status, const char *format, ...) {
    int reason = errno;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "dockyard-init: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, ": %s\n", strerror(reason));
    va_end(arguments);
    exit(status);
}

void write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail("write '%s' to %s", text, path);
    close(fd);
}
