/* Stand-in for libcufile: the calls that larder-gds uses, over plain files and memory of the host.
 *
 * It follows the contract of cufile.h (CUDA 13), and can break it on demand. Each copy of the library has
 * its own state, so each test loads a copy.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { int err; int cu_err; } status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } description;
typedef struct {
    struct {
        unsigned major_version, minor_version;
        size_t poll_thresh_size, max_direct_io_size;
        unsigned dstatusflags, dcontrolflags;
    } nvfs;
    unsigned fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
    unsigned max_batch_io_size, max_batch_io_timeout_msecs;
} properties;

/* The numbers of `Fault` in mod.rs. */
enum fault {
    NONE,
    SHORT_READS,
    LIBRARY_ERROR,
    SYSTEM_ERROR,
    END_OF_FILE,
    FLIPPED_BIT,
    LONG_READ,
    HANG,
    OPEN_ERROR,
    OPEN_HANG,
    FILE_ERROR,
    MEMORY_ERROR,
};
enum { NVME_SUPPORTED = 4, SYSTEM_ERROR_CODE = 5030, NOT_SUPPORTED_CODE = 5008, PINNING_CODE = 5036 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum fault fault;
static int is_direct, is_open, files, buffers, hanging, reads;

static status result(int code) {
    status value = {code, 0};
    return value;
}

/* Blocks while the fault is `wanted`. */
static void hang_at(enum fault wanted) {
    pthread_mutex_lock(&lock);
    hanging++;
    while (fault == wanted) pthread_cond_wait(&changed, &lock);
    hanging--;
    pthread_mutex_unlock(&lock);
}

static enum fault current(void) {
    pthread_mutex_lock(&lock);
    enum fault value = fault;
    pthread_mutex_unlock(&lock);
    return value;
}

static void count(int *counter, int change) {
    pthread_mutex_lock(&lock);
    *counter += change;
    pthread_mutex_unlock(&lock);
}

/* Controls for tests. */
void stand_in_set(int new_fault, int new_direct) {
    pthread_mutex_lock(&lock);
    fault = (enum fault)new_fault;
    is_direct = new_direct;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* 0: registered files, 1: registered buffers, 2: calls that hang, 3: calls of cuFileRead. */
int stand_in_count(int which) {
    pthread_mutex_lock(&lock);
    int values[] = {files, buffers, hanging, reads};
    int value = which >= 0 && which < 4 ? values[which] : -1;
    pthread_mutex_unlock(&lock);
    return value;
}

status cuFileDriverOpen(void) {
    hang_at(OPEN_HANG);
    if (current() == OPEN_ERROR) return result(SYSTEM_ERROR_CODE);
    pthread_mutex_lock(&lock);
    int was_open = is_open;
    is_open = 1;
    pthread_mutex_unlock(&lock);
    return result(was_open ? 5026 : 0);
}

status cuFileDriverGetProperties(properties *out) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    if (is_direct) {
        out->nvfs.major_version = 2;
        out->nvfs.minor_version = 26;
        out->nvfs.dstatusflags = 1u << NVME_SUPPORTED;
    }
    pthread_mutex_unlock(&lock);
    return result(0);
}

status cuFileHandleRegister(void **handle, description *from) {
    if (!is_open || from->type != 1 || from->fs_ops != NULL) return result(5022);
    if (current() == FILE_ERROR) return result(NOT_SUPPORTED_CODE);
    /* libcufile reads unaligned ranges of files with O_DIRECT. A descriptor without this flag does so here. */
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", from->handle.fd);
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return result(SYSTEM_ERROR_CODE);
    count(&files, 1);
    *handle = (void *)(intptr_t)(file + 1);
    return result(0);
}

void cuFileHandleDeregister(void *handle) {
    close((int)(intptr_t)handle - 1);
    count(&files, -1);
}

status cuFileBufRegister(const void *base, size_t length, int flags) {
    if (base == NULL || length == 0 || flags != 0) return result(5022);
    if (current() == MEMORY_ERROR) return result(PINNING_CODE);
    count(&buffers, 1);
    return result(0);
}

status cuFileBufDeregister(const void *base) {
    if (base == NULL) return result(5022);
    if (current() == MEMORY_ERROR) return result(PINNING_CODE);
    count(&buffers, -1);
    return result(0);
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t file_offset, off_t base_offset) {
    count(&reads, 1);
    hang_at(HANG);
    enum fault now = current();
    if (now == LIBRARY_ERROR) return -SYSTEM_ERROR_CODE;
    if (now == SYSTEM_ERROR) {
        errno = EIO;
        return -1;
    }
    if (now == END_OF_FILE) return 0;
    size_t wanted = now == SHORT_READS && size > 1 ? size / 2 : size;
    char *target = (char *)base + base_offset;
    ssize_t found = pread((int)(intptr_t)handle - 1, target, wanted, file_offset);
    if (now == FLIPPED_BIT && found > 0) target[found / 2] ^= 4;
    if (now == LONG_READ) return (ssize_t)size + 1;
    return found;
}
