/*
 * The number formats and the dropout generator, which every backend shares, against formulas and vectors from elsewhere: each
 * code of each narrow format, each halfway point between two neighbours, and what lies next to it on both sides.
 */
#include <math.h>
#include <stdlib.h>

#include "numeric.h"
#include "philox.h"
#include "test.h"

typedef struct format {
    attn_dtype dtype;
    int e_bits, m_bits;
    bool has_inf;   /* the exponent of ones holds infinity and NaNs; otherwise all ones is NaN */
    bool saturates; /* what is too large becomes the largest number instead of infinity */
} format;

static const format formats[] = {
    {ATTN_F16, 5, 10, true, false},
    {ATTN_BF16, 8, 7, true, false},
    {ATTN_E4M3, 4, 3, false, true},
    {ATTN_E5M2, 5, 2, true, true},
};

/* The positive code after the largest finite one: infinity, or e4m3's NaN. */
static unsigned finite_codes(const format *f) {
    unsigned ones = (1u << f->e_bits) - 1;
    return f->has_inf ? ones << f->m_bits : (ones << f->m_bits) + (1u << f->m_bits) - 1;
}

/* The number of a positive code, and of the first one that would come after the largest. */
static double value_of(const format *f, unsigned code) {
    int bias = (1 << (f->e_bits - 1)) - 1, e = (int)(code >> f->m_bits), m = (int)(code & ((1u << f->m_bits) - 1));
    return e == 0 ? ldexp(m, 1 - bias - f->m_bits) : ldexp((1 << f->m_bits) + m, e - bias - f->m_bits);
}

/* One element; as large as the widest of them, since attn__load is one function for all. */
typedef union element {
    uint8_t byte;
    uint16_t word;
    double room;
} element;

static double load(const format *f, unsigned code) {
    element x = {0};
    if (attn_dtype_size(f->dtype) == 1)
        x.byte = (uint8_t)code;
    else
        x.word = (uint16_t)code;
    return attn__load(f->dtype, &x, 0);
}

static unsigned store(const format *f, double value) {
    element x = {0};
    attn__store(f->dtype, &x, 0, value);
    return attn_dtype_size(f->dtype) == 1 ? x.byte : x.word;
}

/* x and -x go to this code and its negative. */
static void check_store(const format *f, double x, unsigned code) {
    unsigned sign = 1u << (f->e_bits + f->m_bits);
    CHECK_SAY(store(f, x) == code, "%s: %.17g went to 0x%x, not 0x%x", attn_dtype_name(f->dtype), x, store(f, x), code);
    CHECK_SAY(store(f, -x) == (code | sign), "%s: %.17g went to 0x%x, not 0x%x", attn_dtype_name(f->dtype), -x,
              store(f, -x), code | sign);
}

TEST(numbers_every_code_has_its_value_and_comes_back) {
    for (size_t n = 0; n < sizeof formats / sizeof *formats; n++) {
        const format *f = &formats[n];
        unsigned sign = 1u << (f->e_bits + f->m_bits), end = finite_codes(f);
        test_context("%s", attn_dtype_name(f->dtype));
        for (unsigned code = 0; code < end; code++) {
            CHECK(load(f, code) == value_of(f, code));
            CHECK(load(f, code | sign) == -value_of(f, code) && signbit(load(f, code | sign)));
            check_store(f, value_of(f, code), code);
        }
        for (unsigned code = end; code < sign; code++) {
            bool infinite = f->has_inf && code == end;
            CHECK(infinite ? load(f, code) == INFINITY && load(f, code | sign) == -INFINITY
                           : isnan(load(f, code)) && isnan(load(f, code | sign)));
        }
        CHECK(isnan(load(f, store(f, NAN))));
        check_store(f, INFINITY, f->saturates ? end - 1 : end);
        check_store(f, 1e300, f->saturates ? end - 1 : end);
        check_store(f, 1e-300, 0);
    }
    test_context(NULL);
}

TEST(numbers_round_to_nearest_ties_to_even) {
    for (size_t n = 0; n < sizeof formats / sizeof *formats; n++) {
        const format *f = &formats[n];
        unsigned end = finite_codes(f);
        test_context("%s", attn_dtype_name(f->dtype));
        for (unsigned code = 0; code < end; code++) {
            unsigned next = code + 1 == end && f->saturates ? code : code + 1;
            double half = (value_of(f, code) + value_of(f, code + 1)) / 2;
            check_store(f, half, code % 2 ? next : code);
            /* next to it among the doubles, too near for a float to tell */
            check_store(f, nextafter(half, 0), code);
            check_store(f, nextafter(half, INFINITY), next);
            check_store(f, nextafterf((float)half, 0), code);
            check_store(f, nextafterf((float)half, INFINITY), next);
        }
    }
    test_context(NULL);
}

TEST(numbers_int8_rounds_and_saturates) {
    for (int code = -128; code < 128; code++) {
        int8_t x = (int8_t)code, y;
        CHECK(attn__load(ATTN_I8, &x, 0) == code);
        attn__store(ATTN_I8, &y, 0, code);
        CHECK(y == code);
        if (code == 127) break;
        attn__store(ATTN_I8, &y, 0, code + 0.5);
        CHECK(y == (code % 2 ? code + 1 : code));
        attn__store(ATTN_I8, &y, 0, nextafter(code + 0.5, -INFINITY));
        CHECK(y == code);
        attn__store(ATTN_I8, &y, 0, nextafter(code + 0.5, INFINITY));
        CHECK(y == code + 1);
    }
    static const struct {
        double x;
        int8_t want;
    } ends[] = {{127.4, 127},   {127.5, 127},   {1e300, 127},     {INFINITY, 127},
                {-128.4, -128}, {-1e300, -128}, {-INFINITY, -128}};
    for (size_t n = 0; n < sizeof ends / sizeof *ends; n++) {
        int8_t y;
        attn__store(ATTN_I8, &y, 0, ends[n].x);
        CHECK_SAY(y == ends[n].want, "%g went to %d", ends[n].x, y);
    }
}

/* The known answers that are published with the generator: counter, key, result. */
TEST(s08_ref_philox_known_answers) {
    static const uint32_t known[][10] = {
        {0, 0, 0, 0, 0, 0, 0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x5207ddc2, 0x45165e59, 0x4d8ee751,
         0x8c52f662},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0x4dfccaba, 0x190a87f0, 0xc47362ba,
         0xb6b5242a},
    };
    for (size_t n = 0; n < sizeof known / sizeof *known; n++) {
        const uint32_t *x = known[n];
        attn_philox g = attn__philox_make((uint64_t)x[5] << 32 | x[4], x[3], 0.5);
        uint32_t out[4];
        attn__philox4(&g, x[2], x[1], x[0], out);
        for (int m = 0; m < 4; m++) {
            CHECK_SAY(out[m] == x[6 + m], "vector %d, word %d: 0x%08x, not 0x%08x", (int)n, m, out[m], x[6 + m]);
            for (uint32_t half = 0; half < 2; half++)
                CHECK(x[0] > UINT32_MAX / 8 || attn__dropped(&g, x[2], x[1], 8 * x[0] + 2 * (uint32_t)m + half) ==
                                                   ((x[6 + m] >> 16 * half & 0x4000) == 0));
        }
    }
}

TEST(s08_philox_drops_as_often_as_asked) {
    enum { ROWS = 500, KEYS = 400 };
    static const double asked[] = {0, 0.001, 0.1, 0.5, 0.9};
    for (size_t n = 0; n < sizeof asked / sizeof *asked; n++) {
        attn_philox g = attn__philox_make(42, 7, asked[n]);
        int dropped = 0;
        for (uint32_t i = 0; i < ROWS; i++)
            for (uint32_t j = 0; j < KEYS; j++) dropped += attn__dropped(&g, 3, i, j);
        double deviation = sqrt(ROWS * KEYS * asked[n] * (1 - asked[n]));
        CHECK_CLOSE(dropped, ROWS * KEYS * asked[n], 5 * deviation);
    }
}
