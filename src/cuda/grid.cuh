/*
 * Kernels that begin before the one before them in the stream has ended (attn_cuda_entry.waits): what does not read memory is done by then.
 *
 * Every thread waits before it reads or writes anything but the kernel's arguments, and before it ends, so that whoever waits for this kernel has
 * waited for those before it, too. Neither instruction is there before sm_90, and a kernel without them is not launched early.
 */
#ifndef ATTN_GRID_CUH
#define ATTN_GRID_CUH

/* Until the kernel before has ended, and what it wrote can be seen. */
static __device__ __forceinline__ void griddepcontrol_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* From here on, when all blocks have come here, the next kernel may begin; it waits in its turn. */
static __device__ __forceinline__ void griddepcontrol_launch_dependents(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
