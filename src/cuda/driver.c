/*
 * The driver's library is found, checked and listed here, once per process.
 *
 * Only the system's loader decides where libcuda.so.1 is; ATTN_CUDA_DRIVER may name another one by an absolute path (a relative
 * one would be whatever lies in the current directory). The library stays loaded: its threads and exit handlers would not
 * survive otherwise.
 */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_VERSION = 12000 }; /* cuLibraryLoadData and the calls around it */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static const attn_driver *replacement;                    /* a test's driver */
static attn_driver table;
static attn_driver_state found;
static bool is_found;

static const struct {
    const char *symbol;
    size_t offset;
} entries[] = {
#define ENTRY(name, symbol, arguments) {symbol, offsetof(attn_driver, name)},
#include "driver.def"
#undef ENTRY
};

attn_status attn__driver_fail(const attn_driver *driver, int error, const char *call) {
    const char *name = NULL, *text = NULL;
    if (driver->cuGetErrorName(error, &name) || !name) name = "an error that the driver has no name for";
    if (driver->cuGetErrorString(error, &text) || !text) text = "no text";
    return attn__fail(error == ATTN_CU_OUT_OF_MEMORY ? ATTN_NO_MEMORY : ATTN_DEVICE, "%s=%d: %s, %s", call, error, name,
                      text);
}

static attn_status check_version(const attn_driver *driver, int32_t *version) {
    int number = 0;
    int error = driver->cuDriverGetVersion(&number);
    RETURN_IF(error, ATTN_DEVICE, "cuDriverGetVersion=%d: the CUDA driver does not say its version", error);
    RETURN_IF(number < LEAST_VERSION, ATTN_UNSUPPORTED,
              "backend=cuda: this driver is for CUDA %d.%d; want 12.0 or newer, or the cpu backend", number / 1000,
              number % 1000 / 10);
    *version = number;
    return ATTN_OK;
}

/* Fills the table from the library; an old driver is called old, whatever else it lacks. */
static attn_status fill_table(void *library, const char *path) {
    const char *missing = NULL;
    int32_t version;
    for (size_t n = 0; n < sizeof entries / sizeof entries[0]; n++) {
        void *address = dlsym(library, entries[n].symbol);
        if (!address && !missing) missing = entries[n].symbol;
        memcpy((char *)&table + entries[n].offset, &address, sizeof address);
    }
    RETURN_IF(!table.cuDriverGetVersion, ATTN_UNSUPPORTED, "backend=cuda: %s has no cuDriverGetVersion: no CUDA driver",
              path);
    RETURN_IF_ERROR(check_version(&table, &version));
    RETURN_IF(missing, ATTN_UNSUPPORTED, "backend=cuda: %s has no %s; want a newer driver, or the cpu backend", path,
              missing);
    return ATTN_OK;
}

static attn_status load(void) {
    const char *path = getenv("ATTN_CUDA_DRIVER");
    if (!path || !*path)
        path = "libcuda.so.1";
    else
        RETURN_IF(*path != '/', ATTN_INVALID, "ATTN_CUDA_DRIVER=%s: want an absolute path", path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        return attn__fail(ATTN_UNSUPPORTED, "backend=cuda: no CUDA driver (%s); use cpu", why ? why : path);
    }
    attn_status status = fill_table(library, path);
    if (status != ATTN_OK) dlclose(library);
    return status;
}

static attn_status look_at(const attn_driver *d, int ordinal, attn_gpu *gpu) {
    int device, major, minor, shared, sms;
    RETURN_IF_DRIVER(d, cuDeviceGet, (&device, ordinal));
    RETURN_IF_DRIVER(d, cuDeviceGetAttribute, (&major, ATTN_CU_DEVICE_MAJOR, device));
    RETURN_IF_DRIVER(d, cuDeviceGetAttribute, (&minor, ATTN_CU_DEVICE_MINOR, device));
    RETURN_IF_DRIVER(d, cuDeviceGetAttribute, (&shared, ATTN_CU_DEVICE_SHARED, device));
    RETURN_IF_DRIVER(d, cuDeviceGetAttribute, (&sms, ATTN_CU_DEVICE_SMS, device));
    RETURN_IF_DRIVER(d, cuDeviceGetName, (gpu->name, sizeof gpu->name, device));
    gpu->device = device;
    gpu->arch = major * 10 + minor;
    gpu->shared_bytes = shared;
    gpu->sms = sms;
    return ATTN_OK;
}

static attn_status find(void) {
    const attn_driver *d = replacement ? replacement : &table;
    if (!replacement) RETURN_IF_ERROR(load());
    int error, count = 0;
    RETURN_IF_ERROR(check_version(d, &found.version));
    error = d->cuInit(0);
    RETURN_IF(error == ATTN_CU_NO_DEVICE, ATTN_UNSUPPORTED, "backend=cuda: the driver sees no GPU; use cpu");
    if (error) return attn__driver_fail(d, error, "cuInit");
    RETURN_IF_DRIVER(d, cuDeviceGetCount, (&count));
    RETURN_IF(count < 1, ATTN_UNSUPPORTED, "backend=cuda: the driver sees no GPU; use cpu");
    found.gpus = count < ATTN_MOST_GPUS ? count : ATTN_MOST_GPUS;
    for (int n = 0; n < found.gpus; n++) RETURN_IF_ERROR(look_at(d, n, &found.gpu[n]));
    found.driver = d;
    return ATTN_OK;
}

attn_status attn__driver_open(const attn_driver_state **state) {
    pthread_mutex_lock(&mutex);
    attn_status status = is_found ? ATTN_OK : find();
    is_found = status == ATTN_OK;
    pthread_mutex_unlock(&mutex);
    *state = status == ATTN_OK ? &found : NULL;
    return status;
}

void attn__driver_replace(const attn_driver *driver) {
    pthread_mutex_lock(&mutex);
    replacement = driver;
    is_found = false;
    pthread_mutex_unlock(&mutex);
}
