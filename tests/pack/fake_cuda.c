// A driver that runs nothing: it answers as a Hopper GPU would and writes every call that matters to FAKE_CUDA_LOG.
//
// Kernel parameters are written byte for byte, with the sizes that the device code itself states. Handles are small
// numbers or places in memory of this library, so that two processes that do the same write the same.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, NOT_FOUND = 500 };
enum { PARAMETERS = 64, KERNELS = 256 };

typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream;
    const struct { uint32_t id, pad; unsigned char value[64]; } *attributes;
    uint32_t num_attributes;
} Config;

typedef struct {
    char name[512];
    int count, sizes[PARAMETERS];
} Kernel;

static Kernel kernels[KERNELS];
static int num_kernels, current = -1;
static char contexts[16];

static FILE *log_file(void) {
    static FILE *file;
    const char *path = getenv("FAKE_CUDA_LOG");
    if (!file) file = fopen(path ? path : "/dev/null", "a");
    setvbuf(file, NULL, _IOLBF, 1 << 16);
    return file;
}

// Whether FAKE_CUDA_FAIL names a call: it then answers that a value is invalid.
static int fails(const char *call) {
    const char *text = getenv("FAKE_CUDA_FAIL");
    return text && !strcmp(text, call);
}

static int devices(void) {
    const char *text = getenv("FAKE_CUDA_DEVICES");
    return text ? atoi(text) : 1;
}

// EIATTR_KPARAM_INFO of .nv.info.<kernel>: the ordinal of a parameter and, from bit 18 on, its size.
static void read_parameters(const unsigned char *image, Kernel *kernel) {
    const Elf64_Ehdr *head = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + head->e_shoff);
    const char *names = (const char *)image + sections[head->e_shstrndx].sh_offset;
    for (int s = 0; s < head->e_shnum; s++) {
        const char *name = names + sections[s].sh_name;
        if (strncmp(name, ".nv.info.", 9) || strcmp(name + 9, kernel->name)) continue;
        const unsigned char *at = image + sections[s].sh_offset, *end = at + sections[s].sh_size;
        while (at + 4 <= end) {
            uint16_t length;
            memcpy(&length, at + 2, 2);
            if (at[0] == 4 && at[1] == 0x17) {
                uint16_t ordinal;
                uint32_t packed;
                memcpy(&ordinal, at + 8, 2);
                memcpy(&packed, at + 12, 4);
                kernel->sizes[ordinal] = packed >> 18;
                if (ordinal >= kernel->count) kernel->count = ordinal + 1;
            }
            at += at[0] == 4 ? 4 + length : 4;
        }
    }
}

static uint64_t checksum(const unsigned char *image) {
    const Elf64_Ehdr *head = (const void *)image;
    size_t size = head->e_phoff + (size_t)head->e_phnum * head->e_phentsize;
    uint64_t hash = 1469598103934665603ull;
    for (size_t i = 0; i < size; i++) hash = (hash ^ image[i]) * 1099511628211ull;
    return hash;
}

// An image is a cubin, or a container around one: 16 bytes, then the entry's own header, whose size stands in it.
static Result load(void **library, const void *image) {
    if (fails("load")) return 1;
    const uint32_t *words = image;
    if (words[0] == 0xba55ed50) image = (const char *)image + 16 + words[5];
    fprintf(log_file(), "load %016llx\n", (unsigned long long)checksum(image));
    *library = (void *)image;
    return SUCCESS;
}

static Result get(void **function, void *library, const char *name) {
    Kernel *kernel = &kernels[num_kernels++];
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    read_parameters(library, kernel);
    if (!kernel->count) return NOT_FOUND;
    *function = kernel;
    return SUCCESS;
}

static void attribute(const Kernel *kernel, int name, int value, int device) {
    fprintf(log_file(), "attribute %s %d = %d on %d\n", kernel->name, name, value, device);
}

static Result launch(const Kernel *kernel, const Config *config, void **parameters) {
    if (fails("launch")) return 1;
    FILE *file = log_file();
    fprintf(file, "launch %s on %d grid %u %u %u block %u %u %u shared %u stream %p", kernel->name, current,
            config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2],
            config->shared, config->stream);
    for (uint32_t i = 0; i < config->num_attributes; i++) {
        fprintf(file, " attribute %u", config->attributes[i].id);
        for (int byte = 0; byte < 12; byte++) fprintf(file, "%c%02x", byte ? ',' : ' ', config->attributes[i].value[byte]);
    }
    for (int i = 0; i < kernel->count; i++) {
        fprintf(file, " parameter ");
        for (int byte = 0; byte < kernel->sizes[i]; byte++) fprintf(file, "%02x", ((unsigned char *)parameters[i])[byte]);
    }
    fprintf(file, "\n");
    return SUCCESS;
}

Result cuInit(unsigned flags) { (void)flags; return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = devices(); return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < devices() ? SUCCESS : 101; }
Result cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, length, "Fake H100"); return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 1: *value = 1024; break;          // threads of a block
    case 2: case 3: *value = 1024; break;  // their extents
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;    // the grid's
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;         // shared memory of a block
    case 10: *value = 32; break;
    case 16: *value = 132; break;          // multiprocessors
    case 75: *value = 9; break;            // capability
    case 76: *value = 0; break;
    case 81: *value = 233472; break;
    case 97: *value = 232448; break;       // shared memory that a block can opt in to
    default: *value = 1;
    }
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
Result cuDevicePrimaryCtxRelease(int device) { (void)device; return SUCCESS; }
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return 0; }
Result cuCtxGetCurrent(void **context) { *context = current < 0 ? NULL : &contexts[current]; return SUCCESS; }
Result cuCtxSetCurrent(void *context) { current = context ? (int)((char *)context - contexts) : -1; return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = current; return current < 0 ? 201 : SUCCESS; }
Result cuGetErrorName(Result result, const char **name) { (void)result; *name = "CUDA_ERROR_FAKE"; return SUCCESS; }
Result cuGetErrorString(Result result, const char **text) { (void)result; *text = "a made-up error"; return SUCCESS; }

Result cuLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    return load(library, image);
}
Result cuLibraryUnload(void *library) { (void)library; return SUCCESS; }
Result cuLibraryGetKernel(void **kernel, void *library, const char *name) { return get(kernel, library, name); }
Result cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return SUCCESS; }
Result cuKernelGetAttribute(int *value, int name, void *kernel, int device) {
    (void)name, (void)kernel, (void)device;
    *value = 1024;
    return SUCCESS;
}
Result cuKernelSetAttribute(int name, int value, void *kernel, int device) {
    attribute(kernel, name, value, device);
    return SUCCESS;
}
Result cuModuleLoadData(void **module, const void *image) { return load(module, image); }
Result cuModuleUnload(void *module) { (void)module; return SUCCESS; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { return get(function, module, name); }
Result cuFuncSetAttribute(void *function, int name, int value) {
    attribute(function, name, value, current);
    return SUCCESS;
}
Result cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    (void)extra;
    return launch(function, config, parameters);
}
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
    (void)extra;
    return launch(function, &config, parameters);
}
Result cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    if (fails("tensor map")) return 1;
    FILE *file = log_file();
    fprintf(file, "tensor map type %d rank %u at %p", type, rank, address);
    for (uint32_t i = 0; i < rank; i++) fprintf(file, " %llu", (unsigned long long)extents[i]);
    for (uint32_t i = 0; i + 1 < rank; i++) fprintf(file, " by %llu", (unsigned long long)strides[i]);
    for (uint32_t i = 0; i < rank; i++) fprintf(file, " box %u step %u", box[i], steps[i]);
    fprintf(file, " %d %d %d %d\n", interleave, swizzle, promotion, fill);
    uint64_t *words = map;
    for (int i = 0; i < 16; i++) words[i] = i < (int)rank ? extents[i] : 0x6d6170;
    words[8] = (uint64_t)address, words[9] = (uint64_t)swizzle, words[10] = (uint64_t)type;
    return SUCCESS;
}

Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    char name[256];
    Dl_info self;
    (void)version, (void)flags;
    static void *library;
    if (!library && dladdr((void *)cuInit, &self)) library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = dlsym(library, symbol);
    if (!*function) {
        snprintf(name, sizeof name, "%s_v2", symbol);
        *function = dlsym(library, name);
    }
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
Result cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}


// The runtime library's functions, for the DSLs' own runtimes, which call those: each is the driver's under its name.
typedef struct {
    uint32_t grid[3], block[3];
    size_t shared;
    void *stream;
    const void *attributes;
    uint32_t num_attributes;
} RuntimeConfig;

Result cudaGetDeviceCount(int *count) { return cuDeviceGetCount(count); }
Result cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
Result cudaGetDevice(int *device) {
    if (current < 0) current = 0;
    *device = current;
    return SUCCESS;
}
Result cudaSetDevice(int device) { current = device; return SUCCESS; }
Result cudaDeviceGetAttribute(int *value, int name, int device) { return cuDeviceGetAttribute(value, name, device); }
Result cudaPeekAtLastError(void) { return SUCCESS; }
Result cudaGetLastError(void) { return SUCCESS; }
const char *cudaGetErrorName(Result result) { (void)result; return "cudaErrorFake"; }
const char *cudaGetErrorString(Result result) { (void)result; return "a made-up error"; }
Result cudaLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return cuLibraryLoadData(library, image, a, b, c, d, e, f);
}
Result cudaLibraryUnload(void *library) { return cuLibraryUnload(library); }
Result cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return get(kernel, library, name); }
Result cudaKernelSetAttributeForDevice(void *kernel, int name, int value, int device) {
    return cuKernelSetAttribute(name, value, kernel, device);
}
Result cudaLaunchKernelExC(const RuntimeConfig *config, void *function, void **parameters) {
    Config same = {{config->grid[0], config->grid[1], config->grid[2]},
                   {config->block[0], config->block[1], config->block[2]},
                   (uint32_t)config->shared, config->stream, config->attributes, config->num_attributes};
    return launch(function, &same, parameters);
}
Result cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(symbol, function, (int)version, flags, status);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(void *set, int code) { (void)set, (void)code; abort(); }

// Calls a TVM-FFI function with a stack that holds nothing but `pattern`: bytes that a launch hands over without having
// set them, such as the padding of a struct, are then those of the pattern.
typedef int (*Call)(void *function, void *arguments, int32_t count, void *result);
static __attribute__((noinline)) void scribble(int pattern) {
    volatile unsigned char area[1 << 18];
    for (size_t i = 0; i < sizeof area; i++) area[i] = (unsigned char)pattern;
}
int fake_call(Call call, void *function, void *arguments, int32_t count, int pattern) {
    uint64_t result[2] = {0, 0};
    scribble(pattern);
    return call(function, arguments, count, result);
}
