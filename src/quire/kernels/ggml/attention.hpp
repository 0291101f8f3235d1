// Attention over the cells of a context of llama.cpp, on a CPU.
//
// llama.cpp's own reads K and V once for each token and head. This one reads a tile of cells once for all rows of an
// item, a row being a token and a head; rows are the lanes of vectors, so that nothing is transposed or summed across
// lanes. Few rows, as of one request that decodes, have dimensions and cells as lanes instead. A tile is of cells that
// the same vectors see, wherever they lie: sequences that decode together have their cells in turn, and others' cells
// cost a look at the mask alone. All sums are in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "ggml.h"

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, GROUPS = 3, AT_ONCE = 8;  // lanes of a vector, vectors of an item, cells or dimensions at once
#else
constexpr int W = 8, GROUPS = 2, AT_ONCE = 4;
#endif
constexpr int ROWS = W * GROUPS, TILE = 64, FEW = 4, AHEAD = 24;
constexpr int LONGEST = 576;  // dimensions of a head
constexpr float NONE = -1e30f;
constexpr ggml_fp16_t HIDDEN = 0xFC00;  // -infinity

typedef float Lanes __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));

inline Lanes all(float x) { return Lanes{} + x; }
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

inline Lanes load(const float * from) {
    Lanes found;
    memcpy(&found, from, sizeof(found));
    return found;
}

inline float sum_of(Lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512) x);
#else
    float found = 0;
    for (int i = 0; i < W; i++) {
        found += x[i];
    }
    return found;
#endif
}

// exp(x) for x <= 0, to about one in 10^7
inline Lanes exp_of(Lanes x) {
    const Lanes kept = larger(x, all(-87.0f));
    const Lanes shifted = kept * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    const Lanes n = shifted - 12582912.0f;
    const Lanes r = kept - n * 0.693359375f + n * 2.12194440e-4f;
    Lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints power = ((Ints) shifted - 0x4B400000) << 23;
    const Lanes found = (Lanes) ((Ints) p + power);
    return x < -87.0f ? Lanes{} : found;
}

struct Op {
    const ggml_tensor * q, * k, * v, * mask, * sinks;
    ggml_tensor * dst;
    ggml_to_float_t k_to_float, v_to_float;
    int dk, dv, cells, heads_per_kv, rows;  // rows of one head of K
    float scale;
};

// What rows have of the cells seen so far: greatest score, sum of weights, weighted sum of V.
struct State {
    Lanes most[GROUPS], sum[GROUPS];
    Lanes values[LONGEST][GROUPS];
};

// The same for few rows, whose lanes are dimensions or cells.
struct FewRows {
    alignas(64) float query[FEW][LONGEST], values[FEW][LONGEST], weights[FEW][TILE];
    float most[FEW], sum[FEW];
};

// Cells, and of each the vectors all whose rows see it without a bias, as bits.
struct Cells {
    std::vector<int> at;
    std::vector<uint8_t> plain;
};

struct Scratch {
    Cells seen[1 << GROUPS];  // by the vectors that see them, as bits
    Lanes query[LONGEST][GROUPS];
    Lanes weights[TILE][GROUPS];
    alignas(64) float cells[TILE][LONGEST];
    std::vector<FewRows> few;  // by head of K
};

// A tile of cells of one set: `left` are to come, these included.
struct Tile {
    const int * cells;
    int num, left, plain;

    Tile(const Cells & from, int begin)
        : cells(&from.at[begin]), num(std::min(TILE, (int) from.at.size() - begin)),
          left((int) from.at.size() - begin), plain(0xFF) {
        for (int c = 0; c < num; c++) {
            plain &= from.plain[begin + c];
        }
    }
};

// Read the cells of a tile, and have those of the next one fetched.
void read_cells(const ggml_tensor * from, ggml_to_float_t to_float, int head, const Tile & tile, int width,
                float (*into)[LONGEST]) {
    const char * data = (const char *) from->data + head * from->nb[2];
    const size_t row_bytes = ggml_row_size(from->type, width);
    for (int c = 0; c < tile.num; c++) {
        const char * row = data + (size_t) tile.cells[c] * from->nb[1];
        const char * next = data + (size_t) tile.cells[std::min(c + AHEAD, tile.left - 1)] * from->nb[1];
        for (size_t at = 0; at < row_bytes; at += 64) {
            __builtin_prefetch(next + at);
        }
        int d = 0;
        if (from->type == GGML_TYPE_F16) {
#if defined(__AVX512F__)
            for (; d + 16 <= width; d += 16) {
                _mm512_storeu_ps(into[c] + d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (row + 2 * d))));
            }
#elif defined(__F16C__)
            for (; d + 8 <= width; d += 8) {
                _mm256_storeu_ps(into[c] + d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (row + 2 * d))));
            }
#endif
            for (; d < width; d++) {
                into[c][d] = ggml_fp16_to_fp32(((const ggml_fp16_t *) row)[d]);
            }
        } else {
            to_float(row, into[c], width);
        }
    }
}

// weights[c] = sum over d of cells[c][d] * query[d], for N vectors of rows from `first` on
template <int N> void score(Scratch & own, int first, int num, int dk) {
    for (int c = 0; c < num; c += AT_ONCE) {
        Lanes found[AT_ONCE][N] = {};
        for (int d = 0; d < dk; d++) {
            for (int i = 0; i < AT_ONCE; i++) {
                const Lanes one = all(own.cells[c + i][d]);
                for (int n = 0; n < N; n++) {
                    found[i][n] += one * own.query[d][first + n];
                }
            }
        }
        for (int i = 0; i < AT_ONCE; i++) {
            for (int n = 0; n < N; n++) {
                own.weights[c + i][first + n] = found[i][n];
            }
        }
    }
}

// values[d] += sum over c of cells[c][d] * weights[c]
template <int N> void add_values(Scratch & own, State & state, int first, int num, int dv) {
    for (int d = 0; d < dv; d += AT_ONCE) {
        Lanes found[AT_ONCE][N];
        for (int i = 0; i < AT_ONCE; i++) {
            for (int n = 0; n < N; n++) {
                found[i][n] = state.values[d + i][first + n];
            }
        }
        for (int c = 0; c < num; c++) {
            for (int i = 0; i < AT_ONCE; i++) {
                const Lanes one = all(own.cells[c][d + i]);
                for (int n = 0; n < N; n++) {
                    found[i][n] += one * own.weights[c][first + n];
                }
            }
        }
        for (int i = 0; i < AT_ONCE; i++) {
            for (int n = 0; n < N; n++) {
                state.values[d + i][first + n] = found[i][n];
            }
        }
    }
}

const ggml_fp16_t * mask_of(const Op & op, int row) {
    return (const ggml_fp16_t *) ((const char *) op.mask->data + (size_t) (row / op.heads_per_kv) * op.mask->nb[1]);
}

// Sort cells `[begin, end)` by the vectors that see them; `row` is the first of all, and `width` rows are a vector.
void find_cells(const Op & op, Scratch & own, int row, int groups, int width, int begin, int end) {
    for (Cells & each : own.seen) {
        each.at.clear();
        each.plain.clear();
    }
    for (int at = begin; at < end; at += TILE) {
        const int num = std::min(TILE, end - at);
        uint16_t seen[GROUPS][TILE] = {}, biased[GROUPS][TILE] = {}, any_seen = 0, any_biased = 0;
        for (int g = 0; g < groups; g++) {
            const int first = row + g * width, last = std::min(first + width, op.rows) - 1;
            for (int t = first / op.heads_per_kv; t <= last / op.heads_per_kv; t++) {
                const ggml_fp16_t * mask = mask_of(op, t * op.heads_per_kv) + at;
                for (int c = 0; c < num; c++) {
                    seen[g][c] |= mask[c] ^ HIDDEN;
                    biased[g][c] |= mask[c];
                }
            }
            for (int c = 0; c < num; c++) {
                any_seen |= seen[g][c];
                any_biased |= biased[g][c];
            }
        }
        if (!any_seen) {
            continue;
        }
        if (!any_biased) {
            Cells & all = own.seen[(1 << groups) - 1];
            for (int c = 0; c < num; c++) {
                all.at.push_back(at + c);
            }
            all.plain.insert(all.plain.end(), num, 0xFF);
            continue;
        }
        for (int c = 0; c < num; c++) {
            int by = 0, plain = 0;
            for (int g = 0; g < groups; g++) {
                by |= (seen[g][c] != 0) << g;
                plain |= (biased[g][c] == 0) << g;
            }
            if (by) {
                own.seen[by].at.push_back(at + c);
                own.seen[by].plain.push_back(plain);
            }
        }
    }
}

// Hide cells of a tile from those rows of a vector that do not see them, and add biases.
void add_mask(const Op & op, Scratch & own, int row, int g, const Tile & tile) {
    const ggml_fp16_t * masks[W];
    Ints lanes[W] = {};
    const int first = row / op.heads_per_kv;
    for (int i = 0; i < W; i++) {
        const int at = std::min(row + i, op.rows - 1);
        masks[at / op.heads_per_kv - first] = mask_of(op, at);
        lanes[at / op.heads_per_kv - first][i] = -1;
    }
    const int num_tokens = (std::min(row + W, op.rows) - 1) / op.heads_per_kv - first + 1;
    for (int c = 0; c < tile.num; c++) {
        Ints hidden{};
        Lanes bias{};
        for (int t = 0; t < num_tokens; t++) {
            const ggml_fp16_t at = masks[t][tile.cells[c]];
            hidden |= lanes[t] & -(int32_t) (at == HIDDEN);
            if (at != HIDDEN && at != 0) {
                bias = lanes[t] ? all(ggml_fp16_to_fp32(at)) : bias;
            }
        }
        own.weights[c][g] = hidden ? all(-INFINITY) : own.weights[c][g] + bias;
    }
}

// Weights of a tile for one vector of rows: against the greatest score, which may rise.
void weigh(const Op & op, Scratch & own, State & state, int g, int num) {
    Lanes most = state.most[g];
    for (int c = 0; c < num; c++) {
        most = larger(most, own.weights[c][g]);
    }
    const Lanes shrunk = exp_of(state.most[g] - most);
    Lanes sum = state.sum[g] * shrunk;
    for (int c = 0; c < num; c++) {
        own.weights[c][g] = exp_of(own.weights[c][g] - most);
        sum += own.weights[c][g];
    }
    state.most[g] = most;
    state.sum[g] = sum;
    for (int d = 0; d < op.dv; d++) {
        state.values[d][g] *= shrunk;
    }
}

// Call with each run of neighbouring vectors of a set: how many, and the first.
template <class Call> void for_runs(int set, int groups, Call call) {
    for (int g = 0, n; g < groups; g += std::max(n, 1)) {
        for (n = 0; g + n < groups && set >> (g + n) & 1;) {
            n++;
        }
        n == 3   ? call(std::integral_constant<int, GROUPS>(), g)
        : n == 2 ? call(std::integral_constant<int, 2>(), g)
        : n == 1 ? call(std::integral_constant<int, 1>(), g)
                 : (void) 0;
    }
}

// Rows from `row` on of one head of K, over cells `[begin, end)`.
void attend(const Op & op, Scratch & own, State & state, int head, int row, int begin, int end) {
    const int num_rows = std::min(ROWS, op.rows - row), groups = (num_rows + W - 1) / W;
    for (int i = 0; i < groups * W; i++) {
        const int at = std::min(row + i, op.rows - 1), token = at / op.heads_per_kv;
        const int q_head = head * op.heads_per_kv + at % op.heads_per_kv;
        const float * from =
            (const float *) ((const char *) op.q->data + token * op.q->nb[1] + q_head * op.q->nb[2]);
        for (int d = 0; d < op.dk; d++) {
            own.query[d][i / W][i % W] = from[d] * op.scale;
        }
        const float sink = op.sinks && begin == 0 ? ((const float *) op.sinks->data)[q_head] : NONE;
        state.most[i / W][i % W] = sink;
        state.sum[i / W][i % W] = sink > NONE ? 1.0f : 0.0f;
    }
    memset((void *) state.values, 0, op.dv * sizeof(state.values[0]));
    find_cells(op, own, row, groups, W, begin, end);
    for (int set = 1; set < 1 << groups; set++) {
        for (int at = 0; at < (int) own.seen[set].at.size(); at += TILE) {
            const Tile tile(own.seen[set], at);
            const int padded = (tile.num + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
            read_cells(op.k, op.k_to_float, head, tile, op.dk, own.cells);
            for_runs(set, groups, [&](auto n, int g) { score<n>(own, g, padded, op.dk); });
            for (int g = 0; g < groups; g++) {
                if (set >> g & 1) {
                    if (!(tile.plain >> g & 1)) {
                        add_mask(op, own, row + g * W, g, tile);
                    }
                    weigh(op, own, state, g, tile.num);
                }
            }
            read_cells(op.v, op.v_to_float, head, tile, op.dv, own.cells);
            for_runs(set, groups, [&](auto n, int g) { add_values<n>(own, state, g, tile.num, op.dv); });
        }
    }
}

template <int R> void few_scores(const Scratch & own, FewRows & few, int num, int dk) {
    for (int c = 0; c < num; c++) {
        Lanes found[R] = {};
        for (int d = 0; d < dk; d += W) {
            const Lanes cell = load(own.cells[c] + d);
            for (int r = 0; r < R; r++) {
                found[r] += cell * load(few.query[r] + d);
            }
        }
        for (int r = 0; r < R; r++) {
            few.weights[r][c] = sum_of(found[r]);
        }
    }
}

template <int R> void few_values(const Scratch & own, FewRows & few, const float * shrunk, int num, int dv) {
    for (int d = 0; d < dv; d += W) {
        Lanes found[R];
        for (int r = 0; r < R; r++) {
            found[r] = load(few.values[r] + d) * shrunk[r];
        }
        for (int c = 0; c < num; c++) {
            const Lanes cell = load(own.cells[c] + d);
            for (int r = 0; r < R; r++) {
                found[r] += cell * few.weights[r][c];
            }
        }
        for (int r = 0; r < R; r++) {
            memcpy(few.values[r] + d, &found[r], sizeof(Lanes));
        }
    }
}

// Where rows of one head begin: queries, and nothing seen.
void begin_few(const Op & op, FewRows & few, int head, int begin) {
    for (int r = 0; r < op.rows; r++) {
        const int q_head = head * op.heads_per_kv + r % op.heads_per_kv;
        const char * from = (const char *) op.q->data + r / op.heads_per_kv * op.q->nb[1] + q_head * op.q->nb[2];
        for (int d = 0; d < op.dk; d++) {
            few.query[r][d] = ((const float *) from)[d] * op.scale;
        }
        few.most[r] = op.sinks && begin == 0 ? ((const float *) op.sinks->data)[q_head] : NONE;
        few.sum[r] = few.most[r] > NONE ? 1.0f : 0.0f;
        memset(few.values[r], 0, op.dv * sizeof(float));
    }
}

// A tile of cells for R rows of one head.
template <int R> void add_few(const Op & op, Scratch & own, FewRows & few, int head, const Tile & tile) {
    const int num = tile.num;
    read_cells(op.k, op.k_to_float, head, tile, op.dk, own.cells);
    few_scores<R>(own, few, num, op.dk);
    float shrunk[R];
    for (int r = 0; r < R; r++) {
        const ggml_fp16_t * mask = mask_of(op, r);
        for (int c = 0; c < num && !(tile.plain & 1); c++) {
            const ggml_fp16_t bias = mask[tile.cells[c]];
            few.weights[r][c] += bias == HIDDEN ? -INFINITY : ggml_fp16_to_fp32(bias);
        }
        for (int c = num; c < TILE; c++) {
            few.weights[r][c] = -INFINITY;
        }
        const float before = few.most[r];
        for (int c = 0; c < num; c++) {
            few.most[r] = std::max(few.most[r], few.weights[r][c]);
        }
        shrunk[r] = std::exp(before - few.most[r]);
        Lanes total{};
        for (int c = 0; c < TILE; c += W) {
            const Lanes found = exp_of(load(few.weights[r] + c) - few.most[r]);
            memcpy(few.weights[r] + c, &found, sizeof(found));
            total += found;
        }
        few.sum[r] = few.sum[r] * shrunk[r] + sum_of(total);
    }
    read_cells(op.v, op.v_to_float, head, tile, op.dv, own.cells);
    few_values<R>(own, few, shrunk, num, op.dv);
}

// All of few rows, as where one request decodes, over cells `[begin, end)`: tile by tile for all heads of K, which lie
// beside one another. States of heads are `stride` apart.
void attend_few(const Op & op, Scratch & own, State * states, int stride, int begin, int end) {
    const int heads = (int) op.k->ne[2];
    own.few.resize(std::max(own.few.size(), (size_t) heads));
    for (int head = 0; head < heads; head++) {
        begin_few(op, own.few[head], head, begin);
    }
    find_cells(op, own, 0, 1, op.rows, begin, end);
    for (int at = 0; at < (int) own.seen[1].at.size(); at += TILE) {
        const Tile tile(own.seen[1], at);
        for (int head = 0; head < heads; head++) {
            FewRows & few = own.few[head];
            op.rows == 1   ? add_few<1>(op, own, few, head, tile)
            : op.rows == 2 ? add_few<2>(op, own, few, head, tile)
            : op.rows == 3 ? add_few<3>(op, own, few, head, tile)
                           : add_few<4>(op, own, few, head, tile);
        }
    }
    for (int head = 0; head < heads; head++) {
        const FewRows & few = own.few[head];
        State & state = states[head * stride];
        for (int r = 0; r < op.rows; r++) {
            state.most[0][r] = few.most[r];
            state.sum[0][r] = few.sum[r];
            for (int d = 0; d < op.dv; d++) {
                state.values[d][0][r] = few.values[r][d];
            }
        }
    }
}

// Write what rows found, over all pieces of cells.
void write(const Op & op, State * states, int num, int head, int row) {
    State & total = states[0];
    const int num_rows = std::min(ROWS, op.rows - row), groups = (num_rows + W - 1) / W;
    for (int g = 0; g < groups; g++) {
        Lanes most = total.most[g];
        for (int s = 1; s < num; s++) {
            most = larger(most, states[s].most[g]);
        }
        Lanes sum{};
        for (int s = 0; s < num; s++) {
            const Lanes share = exp_of(states[s].most[g] - most);
            sum += states[s].sum[g] * share;
            for (int d = 0; d < op.dv; d++) {
                const Lanes own = states[s].values[d][g] * share;
                total.values[d][g] = s ? total.values[d][g] + own : own;
            }
        }
        total.sum[g] = sum;
    }
    for (int i = 0; i < num_rows; i++) {
        const int token = (row + i) / op.heads_per_kv;
        const int q_head = head * op.heads_per_kv + (row + i) % op.heads_per_kv;
        float * into = (float *) ((char *) op.dst->data + token * op.dst->nb[2] + q_head * op.dst->nb[1]);
        const float sum = total.sum[i / W][i % W], share = sum > 0 ? 1.0f / sum : 0.0f;
        for (int d = 0; d < op.dv; d++) {
            into[d] = total.values[d][i / W][i % W] * share;
        }
    }
}

bool is_few(const Op & op) { return op.rows <= FEW && op.dk % W == 0 && op.dv % W == 0; }

}  // namespace
