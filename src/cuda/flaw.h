/* What can be wrong with values that only the device sees: the number in the upper half of the status word. */
#ifndef ATTN_CUDA_FLAW_H
#define ATTN_CUDA_FLAW_H

#define ATTN_FLAWS(X)                                                                                                      \
    X(CU_Q, "cu_q")                                                                                                        \
    X(CU_KV, "cu_kv")                                                                                                      \
    X(CU_NEW, "cu_new")                                                                                                    \
    X(USED_Q, "used_q")                                                                                                    \
    X(USED_KV, "used_kv")                                                                                                  \
    X(LEFTPAD, "leftpad")                                                                                                  \
    X(BATCH_INDEX, "batch_index")                                                                                          \
    X(PAGE_TABLE, "page_table")                                                                                            \
    X(ROTARY_POS, "rotary_pos")                                                                                            \
    X(CU, "cu")                                                                                                            \
    X(POS, "pos")

enum {
    ATTN_FLAW_NONE = 0,
#define ATTN_FLAW_ENUM(name, text) ATTN_FLAW_##name,
    ATTN_FLAWS(ATTN_FLAW_ENUM)
#undef ATTN_FLAW_ENUM
};

#endif
