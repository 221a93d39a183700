/* sequence.cuh -- attention over rows that a group of ranks shares: each computes a part (--seq-parallel; dist/sequence.h has
 * the layouts and the oracle). Before attention the ranks exchange parts of rows for heads, after it heads for parts of rows;
 * the gradients go the opposite way. One exchange sends (parts - 1) / parts of the data:
 *
 *   forward:   qkv of the own tokens -> q, k, v of the own heads, RoPE (joined.cuh), attention -> its output for the own tokens
 *   backward:  its gradient for the own tokens -> for the own heads, attention backward -> dqkv for the own tokens
 *
 * Forward keeps qkv and lse as attention wants them, and the output as the next product wants it. So backward exchanges the
 * output once more. The exception is a block whose attention ran last: the last block, and a block that was recomputed. Packing
 * is a pass of its own. Received data needs no unpacking, because each exchange moves one row of the batch.
 *
 * The group has its own communicator, beside the communicator of all ranks (exchange.cuh). NCCL's kernels wait for one another
 * across GPUs. NCCL's user guide ("Using multiple NCCL communicators concurrently") and its authors (NVIDIA/nccl, issue 195)
 * require that all GPUs run the operations of two communicators in one order, one at a time. Otherwise GPU 0 may run operation
 * a while GPU 1 runs operation b. Then each waits for the other for ever. So an exchange of heads runs on the compute stream
 * and waits for everything that the exchange stream has queued (sequence_turn(), `turn` in exchange.cuh). Later work of the
 * exchange stream waits for the compute stream anyway. All ranks queue in the same order. A forward pass waits for all weights
 * before its first exchange, because weights travel outside of its graph.
 */
#ifndef LLMC_SEQUENCE_CUH
#define LLMC_SEQUENCE_CUH

#include "llmc/dist/sequence.h"   // defines: SequenceShare, heads_shape, heads_out, heads_width
#include "llmc/gpu/exchange.cuh"  // defines: Exchange, exchange_join_some, exchange_wait_gathered
#include "llmc/gpu/layers.cuh"    // defines: Queue, attention, attention_cached, attention_backward, pitch_of
#include "llmc/gpu/nccl.cuh"      // defines: NcclGroup, nccl_all_to_all, nccl_leave

enum { PACK_THREADS = 256 };

typedef struct Sequence {
    int parts;            // parts of a row; <= 1: this rank has whole rows, and attention is plain
    NcclGroup* group;     // that shares rows
    cudaStream_t beside;  // the stream that exchanges gradients and weights
    cudaEvent_t turn[2];
    floatX* pieces;  // (heads_room) on their way
    floatX* out;     // (heads_room) attention's output by heads
} Sequence;

/* Returns the elements that one token takes: a row of `width` with all its heads, or `parts` rows with a part of them each. */
static inline size_t heads_room(size_t width, int parts) {
    return size_max(pitch_of(width), (size_t)parts * pitch_of(width / (size_t)parts));
}

// ---------------------------------------------------------------------------------------------------------------------
// packing

/* A row of pieces: its queries, then its keys and values, which lie in three places of the row of all heads. */
typedef struct {
    int T, parts;               // tokens of a part
    int q, kv;                  // elements of a piece's queries, and of its keys
    size_t pitch, piece_pitch;  // from one row with all heads to the next, and from one piece to the next
} HeadsGrid;

/* Block (b parts + p) T + t copies the heads of member p of token t of row b: column c of the piece is
 *
 *   c < q            p q + c                               queries are the first parts q columns of the row
 *   c < q + kv       parts q + p kv + (c - q)              then parts kv of keys
 *   else             parts (q + kv) + p kv + (c - q - kv)  then as many of values
 *
 * of row b T + t. W divides q and kv. BACK: from pieces to rows. */
template <int W, bool BACK>
__global__ void __launch_bounds__(PACK_THREADS) heads_pack_kernel(floatX* pieces, floatX* rows, HeadsGrid g) {
    const size_t block = blockIdx.x, T = g.T, t = block % T, b = block / T / g.parts;
    const int p = (int)(block / T % g.parts);
    floatX *piece = pieces + block * g.piece_pitch, *row = rows + (b * T + t) * g.pitch;
    for (int c = (int)threadIdx.x * W; c < g.q + 2 * g.kv; c += PACK_THREADS * W) {
        const int section = (c >= g.q) + (c >= g.q + g.kv);
        const int before = section == 0 ? 0 : section == 1 ? g.q : g.q + g.kv;  // of the piece
        const int column = g.parts * before + p * (section == 0 ? g.q : g.kv) + (c - before);
        floatX *in_piece = piece + c, *in_row = row + column;
        store_vec(BACK ? in_row : in_piece, load_vec<W>(BACK ? in_piece : in_row));
    }
}

/* Packs rows (B T, heads_width) into pieces (B, parts, T, heads_width / parts), or with `back` writes rows from pieces; both
 * have the pitch of their width. The oracle is heads_pack() of dev/test/oracles.h. */
static inline void heads_pack_cuda(floatX* pieces, floatX* rows, AttentionShape s, int parts, bool back, cudaStream_t stream) {
    const size_t width = heads_width(s), blocks = (size_t)s.B * s.T * parts;
    const HeadsGrid g = {s.T, parts, s.NH / parts * s.HD, s.NKV / parts * s.HD, pitch_of(width), pitch_of(width / parts)};
    if (blocks == 0) { return; }
    assert(blocks <= INT32_MAX);
    const bool wide = g.q % VECTOR<floatX> == 0 && g.kv % VECTOR<floatX> == 0;
    auto* pack = wide ? heads_pack_kernel<VECTOR<floatX>, false> : heads_pack_kernel<1, false>;
    auto* unpack = wide ? heads_pack_kernel<VECTOR<floatX>, true> : heads_pack_kernel<1, true>;
    (back ? unpack : pack)<<<(unsigned)blocks, PACK_THREADS, 0, stream>>>(pieces, rows, g);
    CUDA_CHECK_LAUNCH("heads_pack_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Connects the GPUs that share rows. All ranks call this. *group becomes NULL where rows are not shared; sequence_close()
 * frees. Fails on all ranks if one cannot. */
static inline bool sequence_join(NcclGroup** group, Team* team, SequenceShare share, Error* e) {
    *group = NULL;
    return share.row_ranks <= 1 || exchange_join_some(group, team, team->run.rank - share.part, 1, share.row_ranks, e);
}

/* Makes the events. The model lays out the buffers. beside: the stream of the exchange */
static inline void sequence_open(Sequence* p, cudaStream_t beside) {
    p->beside = beside;
    for (int i = 0; p->parts > 1 && i < 2; i++) { p->turn[i] = event_new(); }
}

static inline void sequence_close(Sequence* p) {
    for (int i = 0; p->parts > 1 && i < 2; i++) { CUDA_CHECK(cudaEventDestroy(p->turn[i])); }
    if (p->group) { nccl_leave(p->group); }
    free(p->group);
}

// ---------------------------------------------------------------------------------------------------------------------
// exchanges

/* Lets the compute stream wait for all weights, before the first exchange of a forward pass. They arrive in order. */
static inline void sequence_begin(const Sequence* p, const Exchange* x) {
    if (p->parts > 1) { exchange_wait_gathered(x, x->buckets.items[x->buckets.count - 1].layer); }
}

/* Lets the compute stream wait for all operations queued on the exchange stream. The exchange stream joins it first, as every
 * stream of a captured graph must. */
static inline void sequence_turn(const Sequence* p, cudaStream_t compute) {
    stream_wait(p->beside, compute, p->turn[0]);
    stream_wait(compute, p->beside, p->turn[1]);
}

/* Exchanges pieces (B, parts, T, heads / parts) for heads (B, T parts, heads / parts), or heads for pieces; both have the
 * same size. Block p of each row goes to member p, and the block that member p sends takes its place. s: the shape of a part */
static inline void sequence_exchange(const Queue* q, const Sequence* p, floatX* to, const floatX* from, AttentionShape s) {
    const size_t block = (size_t)s.T * pitch_of(heads_width(s) / p->parts), row = block * p->parts;
    sequence_turn(p, q->stream);
    for (size_t b = 0; b < (size_t)s.B; b++) {
        nccl_all_to_all(p->group, from + b * row, to + b * row, block * sizeof(floatX), q->stream, "the exchange of heads");
    }
}

/* Return, for the profile, the bytes that an exchange reads and writes on this card. */
static inline double exchange_bytes(AttentionShape s) { return bytes_x(4.0 * s.B * s.T * (double)heads_width(s)); }

/* Writes heads from rows; both may be one buffer. */
static inline void rows_to_heads(const Queue* q, const Sequence* p, floatX* heads, floatX* rows, AttentionShape s) {
    Op op(q, "exchange of heads", 0, exchange_bytes(s));
    heads_pack_cuda(p->pieces, rows, s, p->parts, false, q->stream);
    sequence_exchange(q, p, heads, p->pieces, s);
}

/* Writes rows from heads; both may be one buffer. */
static inline void heads_to_rows(const Queue* q, const Sequence* p, floatX* rows, const floatX* heads, AttentionShape s) {
    Op op(q, "exchange of heads", 0, exchange_bytes(s));
    sequence_exchange(q, p, p->pieces, heads, s);
    heads_pack_cuda(p->pieces, rows, s, p->parts, true, q->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention

/* Returns the rows as attention computes them here: all heads of whole rows, or this rank's heads. */
static inline Rows heads_of(const Rows* r) {
    Rows heads = *r;
    if (r->shared) { heads.shape = heads_shape(r->shape, r->shared->parts); }
    return heads;
}

/* Writes att (B T, NH HD), and for a batch lse by heads, from qkv by heads. */
static inline void attend(const Queue* q, floatX* att, float* lse, const floatX* qkv, const Rows* r) {
    const Sequence* p = r->shared;
    if (r->cache) {
        attention_cached(q, att, qkv, r);
        return;
    }
    const Rows heads = heads_of(r);
    attention(q, p ? p->out : att, lse, qkv, &heads);
    if (p) { heads_to_rows(q, p, att, p->out, heads_out(r->shape)); }
}

/* Writes dqkv (B T, QKV), the gradient before the rotation by RoPE, from datt (B T, NH HD), which it may overwrite. `fresh`:
 * no attend() of another block came after the attend() of this block. */
static inline void attend_backward(const Queue* q, floatX* dqkv, floatX* datt, floatX* att, bool fresh, const float* lse,
                                   const floatX* qkv, const Rows* r) {
    const Sequence* p = r->shared;
    if (!p) {
        attention_backward(q, dqkv, datt, att, lse, qkv, r);
        return;
    }
    const Rows heads = heads_of(r);
    rows_to_heads(q, p, datt, datt, heads_out(r->shape));
    if (!fresh) { rows_to_heads(q, p, p->out, att, heads_out(r->shape)); }
    attention_backward(q, dqkv, datt, p->out, lse, qkv, &heads);
    heads_to_rows(q, p, dqkv, dqkv, r->shape);
}

#endif
