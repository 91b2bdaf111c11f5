// What packed kernels call while they run, over TVM-FFI and the CUDA driver alone.
//
// A kernel's host code checks its arguments, makes tensor maps and launches. For that it asks the runtime library of its
// DSL for a few functions. In a pack those names begin with MT1 instead (msa_tiles/pack/elf.py renames them), and this
// file is what stands behind them. It is compiled when a pack is made and loaded before the pack's kernels; since no
// other library has such names, packed kernels and those that a DSL compiles live in one process side by side. When a
// function comes to mean something else, FORMAT in msa_tiles/runtime/packs.py is raised, and older packs are refused.
//
// Whoever loads it calls MT1_bind first, with the driver's functions: it links neither with libcuda nor with libdl.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_DEVICES = 64, MAX_PARAMETERS = 96, CUDA = 2 };
enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { MAX_DYNAMIC_SHARED_MEMORY = 8 };    // an attribute of a function
enum { PROGRAMMATIC_SERIALIZATION = 6 };   // attributes of a launch

typedef struct {
    uint32_t id, padding;
    union {
        uint32_t words[16];
        int32_t flag;
    } value;
} Attribute;

// CUlaunchConfig.
typedef struct {
    uint32_t grid[3], block[3], shared_memory;
    void *stream;
    Attribute *attributes;
    uint32_t num_attributes;
} LaunchConfig;

// The functions of the driver, in the order of DRIVER in msa_tiles/runtime/packed.py.
typedef struct {
    int (*device_get_count)(int *);
    int (*device_get)(int *, int);
    int (*device_get_attribute)(int *, int, int);
    int (*primary_context_retain)(void **, int);
    int (*context_set_current)(void *);
    int (*context_get_device)(int *);
    int (*library_load_data)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
    int (*library_unload)(void *);
    int (*library_get_kernel)(void **, void *, const char *);
    int (*kernel_get_attribute)(int *, int, void *, int);
    int (*kernel_set_attribute)(int, int, void *, int);
    int (*module_load_data)(void **, const void *);
    int (*module_get_function)(void **, void *, const char *);
    int (*function_set_attribute)(void *, int, int);
    int (*launch_kernel)(const LaunchConfig *, void *, void **, void **);
    int (*tensor_map_encode_tiled)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                                   const uint32_t *, int, int, int, int);
    int (*get_error_name)(int, const char **);
    int (*get_error_string)(int, const char **);
} Driver;

static Driver driver;
static int num_devices, handles[MAX_DEVICES];
static void *contexts[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Take over the driver's functions; once a process, before anything else.
EXPORT int MT1_bind(const Driver *functions) {
    driver = *functions;
    int result = driver.device_get_count(&num_devices);
    if (num_devices > MAX_DEVICES) num_devices = MAX_DEVICES;
    for (int i = 0; i < num_devices && result == OK; i++) result = driver.device_get(&handles[i], i);
    return result;
}

static void describe(int code, const char **name, const char **text) {
    *name = *text = NULL;
    driver.get_error_name(code, name);
    driver.get_error_string(code, text);
    if (!*name) *name = "an unknown error of the CUDA driver";
    if (!*text) *text = "";
}

static int raise_driver_error(const char *what, int code) {
    const char *name, *text;
    describe(code, &name, &text);
    const char *parts[] = {what, ": ", name, " ", text};
    TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 5);
    return -1;
}

// ---- Devices. torch makes primary contexts current, and so does this where a thread has none yet.

static int ordinal_of(int handle) {
    for (int i = 0; i < num_devices; i++)
        if (handles[i] == handle) return i;
    return handle;
}

static int set_device(int device) {
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    int result = OK;
    pthread_mutex_lock(&lock);
    if (!contexts[device]) result = driver.primary_context_retain(&contexts[device], handles[device]);
    void *context = contexts[device];
    pthread_mutex_unlock(&lock);
    return result == OK ? driver.context_set_current(context) : result;
}

static int get_device(int *device) {
    int handle, result = driver.context_get_device(&handle);
    if (result == INVALID_CONTEXT) {
        *device = 0;
        return set_device(0);
    }
    if (result == OK) *device = ordinal_of(handle);
    return result;
}

// ---- What kernels of CuTe DSL call. Codes of the CUDA runtime and of the driver are the same numbers.

// cudaLaunchConfig_t: the driver's has 32 bits for shared memory.
typedef struct {
    uint32_t grid[3], block[3];
    size_t shared_memory;
    void *stream;
    Attribute *attributes;
    uint32_t num_attributes;
} RuntimeLaunchConfig;

EXPORT int MT1daGetDevice(int *device) { return get_device(device); }

EXPORT int MT1daSetDevice(int device) { return set_device(device); }

EXPORT int MT1daDeviceGetAttribute(int *value, int attribute, int device) {
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    return driver.device_get_attribute(value, attribute, handles[device]);
}

EXPORT int MT1daLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values,
                                unsigned num_jit_options, void *options, void *values, unsigned num_options) {
    return driver.library_load_data(library, image, jit_options, jit_values, num_jit_options, options, values,
                                    num_options);
}

EXPORT int MT1daLibraryGetKernel(void **kernel, void *library, const char *name) {
    return driver.library_get_kernel(kernel, library, name);
}

EXPORT int MT1KernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    return driver.kernel_get_attribute(value, attribute, kernel, handles[device]);
}

EXPORT int MT1daKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    if (device < 0 || device >= num_devices) return INVALID_DEVICE;
    return driver.kernel_set_attribute(attribute, value, kernel, handles[device]);
}

EXPORT int MT1daLaunchKernelEx(const RuntimeLaunchConfig *config, void *kernel, void **parameters) {
    if (config->shared_memory > UINT32_MAX) return INVALID_VALUE;
    LaunchConfig same = {
        .shared_memory = (uint32_t)config->shared_memory,
        .stream = config->stream,
        .attributes = config->attributes,
        .num_attributes = config->num_attributes,
    };
    memcpy(same.grid, config->grid, sizeof same.grid);
    memcpy(same.block, config->block, sizeof same.block);
    return driver.launch_kernel(&same, kernel, parameters, NULL);
}

EXPORT int MT1TensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                                   const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                                   int swizzle, int promotion, int fill) {
    return driver.tensor_map_encode_tiled(map, type, rank, address, extents, strides, box, steps, interleave, swizzle,
                                          promotion, fill);
}

// Load a kernel's device code once a process, and let every device that can take it have it. `state` is the loaded
// library, or null before.
EXPORT int MT1a_dialect_init_library_once(void **state, int (*load)(void **), int (*prepare)(void **, int),
                                          void (*raise)(const char *, const char *)) {
    _Atomic(void *) *slot = (_Atomic(void *) *)state;
    if (atomic_load_explicit(slot, memory_order_acquire)) return 0;
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&loading);
    int result = OK;
    if (!atomic_load_explicit(slot, memory_order_relaxed)) {
        void *library = NULL;
        int failures = 0;
        result = load(&library);
        for (int device = 0; result == OK && prepare && device < num_devices; device++) {
            int code = prepare(&library, device);
            // Another GPU of the machine may be of another family.
            if (code != OK && ++failures == num_devices) result = code;
        }
        if (result == OK) atomic_store_explicit(slot, library, memory_order_release);
    }
    pthread_mutex_unlock(&loading);
    if (result == OK) return 0;
    const char *name, *text;
    char message[512];
    describe(result, &name, &text);
    snprintf(message, sizeof message, "the kernel cannot be loaded: %s %s", name, text);
    raise("RuntimeError", message);
    return -1;
}

EXPORT void MT1a_dialect_unload_library_once(void **state) {
    void *library = atomic_exchange((_Atomic(void *) *)state, NULL);
    if (library) driver.library_unload(library);
}

EXPORT void MT1eDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int32_t), int32_t code) {
    const char *name, *text;
    describe(code, &name, &text);
    const char *parts[] = {"the launch failed: ", name, " ", text};
    raise("RuntimeError", parts, 4);
}

// ---- What kernels of TileLang call: the functions of the CUDA module in their library, and TVM's for tensor maps.

// One device function and how TVM calls it.
typedef struct {
    const char *name, *parameters, *launch;
    const void *image;
    void *functions[MAX_DEVICES];
    int64_t shared_memory[MAX_DEVICES];  // that it is allowed to have
    pthread_mutex_t lock;
} DeviceFunction;

// What `__tvm_ffi__library_ctx` of a packed library points to.
typedef struct {
    DeviceFunction device;
    TVMFFIObjectHandle kernel;
} Library;

// How Python describes a kernel; see `_Description` in msa_tiles/runtime/packed.py.
typedef struct {
    TVMFFISafeCallType entry;
    void **context;          // null for a kernel of CuTe DSL, which needs nothing below
    const void *image;       // the cubin
    const char *name;        // of the device function
    const char *parameters;  // a letter each: l 64 bits, i 32 bits, f float, m tensor map
    const char *launch;      // x y z X Y Z: extents of grid and block; s: dynamic shared memory; p: dependent launch
} Description;

static int function_for(DeviceFunction *device, int index, int64_t shared_memory, void **function) {
    int result = OK;
    pthread_mutex_lock(&device->lock);
    if (!device->functions[index]) {
        void *module = NULL;
        result = driver.module_load_data(&module, device->image);
        if (result == OK) result = driver.module_get_function(&device->functions[index], module, device->name);
        device->shared_memory[index] = -1;
    }
    *function = device->functions[index];
    if (result == OK && strchr(device->launch, 's') && device->shared_memory[index] != shared_memory) {
        result = driver.function_set_attribute(*function, MAX_DYNAMIC_SHARED_MEMORY, (int)shared_memory);
        if (result == OK) device->shared_memory[index] = shared_memory;
    }
    pthread_mutex_unlock(&device->lock);
    return result;
}

// A launch: the kernel's parameters, then what `launch` names.
static int launch(void *self, const TVMFFIAny *arguments, int32_t count, TVMFFIAny *returned) {
    DeviceFunction *device = self;
    const char *kinds = device->parameters;
    int32_t num_parameters = (int32_t)strlen(kinds);
    void *places[MAX_PARAMETERS];
    union {
        int32_t i;
        float f;
    } narrow[MAX_PARAMETERS];
    (void)returned;
    for (int32_t i = 0; i < num_parameters && i < count; i++) {
        places[i] = (void *)&arguments[i].v_ptr;
        if (kinds[i] == 'i') narrow[i].i = (int32_t)arguments[i].v_int64;
        if (kinds[i] == 'f') narrow[i].f = (float)arguments[i].v_float64;
        if (kinds[i] == 'i' || kinds[i] == 'f') places[i] = &narrow[i];
        if (kinds[i] == 'm') places[i] = arguments[i].v_ptr;
    }
    int64_t extents[6] = {1, 1, 1, 1, 1, 1}, shared_memory = 0;
    Attribute dependent = {.id = PROGRAMMATIC_SERIALIZATION};
    uint32_t num_attributes = 0;
    int32_t next = num_parameters;
    for (const char *what = device->launch; *what; what++) {
        if (*what == 'p') {
            dependent.value.flag = 1;
            num_attributes = 1;
            continue;
        }
        if (next >= count) {
            TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a packed kernel came with too few arguments for its launch");
            return -1;
        }
        int64_t value = arguments[next++].v_int64;
        if (*what == 's') shared_memory = value;
        else extents[strchr("xyzXYZ", *what) - "xyzXYZ"] = value;
    }
    LaunchConfig config = {
        .shared_memory = (uint32_t)shared_memory, .attributes = &dependent, .num_attributes = num_attributes};
    for (int i = 0; i < 6; i++) {
        if (extents[i] <= 0 || extents[i] > INT32_MAX) {
            char message[160];
            snprintf(message, sizeof message, "%s: an extent of the launch is %lld, wanted 1 to 2**31 - 1", device->name,
                     (long long)extents[i]);
            TVMFFIErrorSetRaisedFromCStr("ValueError", message);
            return -1;
        }
        *(i < 3 ? &config.grid[i] : &config.block[i - 3]) = (uint32_t)extents[i];
    }
    int index, result = get_device(&index);
    void *function = NULL;
    if (result == OK) result = function_for(device, index, shared_memory, &function);
    if (result != OK) return raise_driver_error("the kernel cannot be loaded", result);
    config.stream = TVMFFIEnvGetStream(CUDA, index);
    result = driver.launch_kernel(&config, function, places, NULL);
    return result == OK ? 0 : raise_driver_error("the launch failed", result);
}

// __tvm_set_device(device type, device)
static int tvm_set_device(void *self, const TVMFFIAny *arguments, int32_t count, TVMFFIAny *returned) {
    (void)self, (void)returned;
    int current, wanted = count > 1 ? (int)arguments[1].v_int64 : -1;
    int result = get_device(&current);
    if (result == OK && current != wanted) result = set_device(wanted);
    return result == OK ? 0 : raise_driver_error("the device cannot be made current", result);
}

// __tvm_tensormap_create_tiled(map, type, rank, address, extents…, strides in bytes…, box…, steps…, interleave, swizzle,
// L2 promotion, fill); the stride of the innermost dimension is implied, and the driver is not told.
static int tvm_tensor_map(void *self, const TVMFFIAny *arguments, int32_t count, TVMFFIAny *returned) {
    (void)self, (void)returned;
    int64_t rank = count > 2 ? arguments[2].v_int64 : 0;
    if (rank < 1 || rank > 5 || count != 8 + 4 * rank) {
        TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a packed kernel asks for a tensor map in a way unknown here");
        return -1;
    }
    uint64_t extents[5], strides[5];
    uint32_t box[5], steps[5];
    const TVMFFIAny *next = arguments + 4;
    for (int i = 0; i < rank; i++) extents[i] = (next++)->v_uint64;
    for (int i = 0; i < rank; i++) strides[i] = (next++)->v_uint64;
    for (int i = 0; i < rank; i++) box[i] = (uint32_t)(next++)->v_int64;
    for (int i = 0; i < rank; i++) steps[i] = (uint32_t)(next++)->v_int64;
    int result = driver.tensor_map_encode_tiled(
        arguments[0].v_ptr, (int)arguments[1].v_int64, (uint32_t)rank, arguments[3].v_ptr, extents, strides + 1, box,
        steps, (int)next[0].v_int64, (int)next[1].v_int64, (int)next[2].v_int64, (int)next[3].v_int64);
    if (result == OK) return 0;
    char what[512];
    int length = snprintf(what, sizeof what, "a tensor map is refused for a tensor at %p, extents", arguments[3].v_ptr);
    for (int i = 0; i < rank; i++)
        length += snprintf(what + length, sizeof what - length, " %llu", (unsigned long long)extents[i]);
    length += snprintf(what + length, sizeof what - length, ", strides in bytes");
    for (int i = 1; i < rank; i++)
        length += snprintf(what + length, sizeof what - length, " %llu", (unsigned long long)strides[i]);
    return raise_driver_error(what, result);
}

static TVMFFIObjectHandle shared_function(TVMFFIObjectHandle *kept, TVMFFISafeCallType function) {
    pthread_mutex_lock(&lock);
    if (!*kept && TVMFFIFunctionCreate(NULL, function, NULL, kept)) *kept = NULL;
    pthread_mutex_unlock(&lock);
    return *kept;
}

// Kernels keep what they are given, which stays theirs for the life of the process.
EXPORT int MT1BackendGetFuncFromEnv(void *context, const char *name, TVMFFIObjectHandle *function) {
    static TVMFFIObjectHandle set_device_function, tensor_map_function;
    Library *library = context;
    *function = NULL;
    if (library && !strcmp(name, library->device.name)) *function = library->kernel;
    if (!strcmp(name, "__tvm_set_device")) *function = shared_function(&set_device_function, tvm_set_device);
    if (!strcmp(name, "__tvm_tensormap_create_tiled")) *function = shared_function(&tensor_map_function, tvm_tensor_map);
    if (*function) return 0;
    const char *parts[] = {"a packed kernel asks for the function ", name, ", which packs do not have"};
    TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 3);
    return -1;
}

// The TVM-FFI function of a loaded library. Takes the address of a Description, whose texts are copied.
EXPORT int __tvm_ffi_open(void *self, const TVMFFIAny *arguments, int32_t count, TVMFFIAny *returned) {
    (void)self;
    const Description *given = count == 1 ? (const Description *)(intptr_t)arguments[0].v_int64 : NULL;
    TVMFFIObjectHandle entry = NULL;
    if (!given || (given->context && strlen(given->parameters) > MAX_PARAMETERS)) {
        TVMFFIErrorSetRaisedFromCStr("ValueError", "open takes the address of one description of a kernel");
        return -1;
    }
    if (given->context && !*given->context) {
        Library *library = calloc(1, sizeof *library);
        if (!library) abort();
        library->device.name = strdup(given->name);
        library->device.parameters = strdup(given->parameters);
        library->device.launch = strdup(given->launch);
        library->device.image = given->image;
        pthread_mutex_init(&library->device.lock, NULL);
        if (TVMFFIFunctionCreate(&library->device, launch, NULL, &library->kernel)) return -1;
        *given->context = library;
    }
    if (TVMFFIFunctionCreate(NULL, given->entry, NULL, &entry)) return -1;
    returned->type_index = kTVMFFIFunction;
    returned->zero_padding = 0;
    returned->v_obj = entry;
    return 0;
}
