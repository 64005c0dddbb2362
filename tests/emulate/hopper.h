/*
 * What compute capability 9.0 has that runs beside the threads, on the CPU: mbarriers, named barriers, copies by tensor maps
 * (hopper.c) and the products of warpgroups (products.c). sm90.h gives them the names of sm90.cuh and wgmma.cuh.
 *
 * Nothing is done earlier than the kernel has waited for it, and what is under way is guarded:
 *
 *   - a load fills its target with 0xff (NaN) when it is issued and with the numbers when somebody waits for its barrier; nobody
 *     may write there meanwhile, and a product may read them only if a lane of its warp has waited for that phase itself, or for
 *     an mbarrier at which somebody has arrived who had, and fenced;
 *   - a store is compared with shared memory, and written, when its thread waits for it;
 *   - a product takes note of its operands when the first thread issues it, and of its registers when each thread does. It is done
 *     when the warpgroup waits for it, from the same operands, or the kernel fails; until then its accumulators are NaN;
 *   - what a thread wrote to shared memory must be fenced by it (fence.proxy.async) before a copy or a product reads it or
 *     a load overwrites it;
 *   - at the end of a block nothing may be under way.
 */
#ifndef EMULATE_HOPPER_H
#define EMULATE_HOPPER_H

#include "fibers.h"

/* In a tensor map, as cuTensorMapEncodeTiled of driver.c makes it: five dims of 16-bit numbers, boxes of 64 columns, 128-byte swizzle. */
enum { EMULATE_RANK = 5, EMULATE_LINE_BYTES = 128 };
typedef struct emulate_map {
    uint64_t magic;
    uint8_t *base;
    uint64_t dims[EMULATE_RANK];        /* columns, rows, blocks of columns, heads, batch */
    uint64_t strides[EMULATE_RANK - 1]; /* in bytes, of rows, blocks, heads, batch */
    uint32_t box[EMULATE_RANK];
} emulate_map;
#define EMULATE_MAP_MAGIC UINT64_C(0x74656e736f726d61)

/* As cuTensorMapEncodeTiled: 0; 1 where the driver would refuse; 801 for what is not emulated. */
int emulate_map_encode(void *map, int type, uint32_t rank, void *base, const uint64_t *dims, const uint64_t *strides,
                       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill);

/* Around each block, by fibers.c. */
void emulate_hopper_begin(unsigned threads);
void emulate_hopper_end(void);
/* What follows is of this block of the cluster. */
void emulate_hopper_enter(unsigned rank);

/* Addresses are those of cvta_shared. */
void emulate_mbarrier_init(uint32_t barrier, int arrivals);
void emulate_fence_mbarrier_init(void);
void emulate_mbarrier_arrive(uint32_t barrier, int arrivals, int bytes);
void emulate_mbarrier_wait(uint32_t barrier, uint32_t parity);
void emulate_bar_arrive(int barrier, int threads);
int emulate_bar_sync(int barrier, int threads, int vote); /* did any thread vote yes? */
void emulate_tensor_load(uint32_t to, const void *map, uint32_t barrier, const int at[EMULATE_RANK]);
void emulate_tensor_store(const void *map, uint32_t from, const int at[EMULATE_RANK]);
void emulate_bulk_store(void *to, uint32_t from, uint32_t bytes, int adds); /* adds: floats to those that are there */
void emulate_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier);
/* A load into several blocks of the cluster, a bit for each; an address of another block's shared memory; and what goes there. */
void emulate_tensor_load_multicast(uint32_t to, const void *map, uint32_t barrier, const int at[EMULATE_RANK],
                                   unsigned mask);
uint32_t emulate_mapa(uint32_t at, unsigned rank);
void emulate_mbarrier_arrive_remote(uint32_t barrier);
void emulate_bulk_to_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier);
void emulate_bulk_commit(void);
void emulate_bulk_wait(int only_read);
void emulate_fence_proxy_async(void);
void emulate_setmaxnreg(int count, int grows);

/* This thread wrote there, as threads do. Costs nothing in kernels without mbarriers. */
extern int emulate_tracks_writes;
void emulate_wrote(uint32_t to, uint32_t bytes);

/* A product or a copy touches the line of 128 bytes with this address: fails if a thread wrote there and did not fence it. */
void emulate_check_fenced(uint32_t line, const char *who);
/* Fails unless this warp has waited for the load that filled the line, if one did. */
void emulate_check_waited(uint32_t line);
/* The piece of 16 bytes at this address of a tile, where the 128-byte swizzle has put it. */
static inline uint32_t emulate_swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

/* d += a b; a: its descriptor, or NULL and four registers. */
typedef struct emulate_product {
    int columns, is_bf16, add;
    int is_mn; /* both a and b in shared memory are MN-major */
    uint64_t a, b;
    const uint32_t *a_registers; /* NULL: a is a descriptor */
    float *d;
} emulate_product;
void emulate_wgmma(emulate_product p);
void emulate_wgmma_fence(void);
void emulate_wgmma_commit(void);
void emulate_wgmma_wait(int left);
void emulate_products_enter(unsigned rank);
void emulate_products_begin(void);
void emulate_products_end(unsigned threads);

#endif
