// A backend of ggml that computes attention alone, beside that of the CPU and in its buffers.
//
// quire_attention_use says whether contexts that are made from then on have it.

#include <atomic>
#include <vector>
#include "attention.hpp"
#include "ggml-backend-impl.h"

namespace {

constexpr int ITEMS_PER_THREAD = 4, LEAST_TILES = 4;  // few items: cells are split too, into pieces of so many tiles

struct Backend {
    int threads = 1;
    std::vector<State> states;
};

void compute(Backend & backend, ggml_tensor * dst) {
    Op op{dst->src[0], dst->src[1], dst->src[2], dst->src[3], dst->src[4], dst};
    op.k_to_float = ggml_get_type_traits(op.k->type)->to_float;
    op.v_to_float = ggml_get_type_traits(op.v->type)->to_float;
    op.dk = (int) op.k->ne[0], op.dv = (int) op.v->ne[0], op.cells = (int) op.k->ne[1];
    op.heads_per_kv = (int) (op.q->ne[2] / op.k->ne[2]);
    op.rows = (int) op.q->ne[1] * op.heads_per_kv;
    memcpy(&op.scale, dst->op_params, sizeof(float));

    const int heads = (int) op.k->ne[2], parts = (op.rows + ROWS - 1) / ROWS, tiles = (op.cells + TILE - 1) / TILE;
    const int wanted = backend.threads > 1 ? backend.threads * ITEMS_PER_THREAD : 1;
    const int wholes = is_few(op) ? 1 : heads * parts;  // items if cells were not split
    const int pieces = std::max(1, std::min((wanted + wholes - 1) / wholes, tiles / LEAST_TILES));
    const int step = (tiles + pieces - 1) / pieces * TILE;
    const bool kept = pieces > 1 || is_few(op);
    if (kept && backend.states.size() < (size_t) heads * parts * pieces) {
        backend.states.resize(heads * parts * pieces);
    }
    #pragma omp parallel num_threads(backend.threads)
    {
        static thread_local std::vector<Scratch> scratch(1);
        static thread_local std::vector<State> one(1);
        #pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < wholes * pieces; item++) {
            const int piece = item % pieces, part = item / pieces % parts, head = item / pieces / parts;
            State & state = kept ? backend.states[item] : one[0];
            const int begin = std::min(piece * step, op.cells), end = std::min(begin + step, op.cells);
            if (is_few(op)) {
                attend_few(op, scratch[0], &state, pieces, begin, end);
            } else {
                attend(op, scratch[0], state, head, part * ROWS, begin, end);
            }
            if (!kept) {
                write(op, &state, 1, head, part * ROWS);
            }
        }
        if (kept) {
            #pragma omp for schedule(static)
            for (int item = 0; item < heads * parts; item++) {
                write(op, &backend.states[item * pieces], pieces, item / parts, item % parts * ROWS);
            }
        }
    }
}

std::atomic<bool> is_used{false};

const char * name_of(ggml_backend_t) { return "quire"; }
void free_backend(ggml_backend_t backend) {
    delete (Backend *) backend->context;
    delete backend;
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_FLASH_ATTN_EXT) {
            compute(*(Backend *) backend->context, node);
        }
    }
    return GGML_STATUS_SUCCESS;
}

bool reads(const ggml_tensor * cells) {
    const bool plain = cells->type == GGML_TYPE_F16 || ggml_get_type_traits(cells->type)->to_float != nullptr;
    return plain && cells->nb[0] == ggml_type_size(cells->type) && cells->ne[3] == 1 && cells->ne[0] <= LONGEST;
}

bool supports(ggml_backend_dev_t, const ggml_tensor * op) {
    if (op->op == GGML_OP_NONE || op->op == GGML_OP_RESHAPE || op->op == GGML_OP_VIEW || op->op == GGML_OP_PERMUTE ||
        op->op == GGML_OP_TRANSPOSE) {
        return true;
    }
    if (op->op != GGML_OP_FLASH_ATTN_EXT) {
        return false;
    }
    float bias, cap;
    memcpy(&bias, (const float *) op->op_params + 1, sizeof(float));
    memcpy(&cap, (const float *) op->op_params + 2, sizeof(float));
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3];
    return bias == 0.0f && cap == 0.0f && mask && mask->ne[2] == 1 && mask->ne[3] == 1 && q->type == GGML_TYPE_F32 &&
           q->ne[3] == 1 && q->nb[0] == sizeof(float) && reads(k) && reads(v) && v->ne[0] % AT_ONCE == 0 &&
           k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0;
}

const char * device_name(ggml_backend_dev_t) { return "quire"; }
const char * device_description(ggml_backend_dev_t) { return "attention over shared cells, by quire"; }
void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return is_used ? GGML_BACKEND_DEVICE_TYPE_ACCEL : GGML_BACKEND_DEVICE_TYPE_CPU;  // of the second one, nobody asks
}
void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
}
ggml_backend_buffer_type_t device_buffers(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }
bool supports_buffers(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return ggml_backend_buft_is_host(type); }

ggml_backend_t open_backend(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = {'q', 'u', 'i', 'r', 'e', ' ', 'a', 't', 't', 'e', 'n', 't', 'i', 'o', 'n', '1'};
    auto * backend = new ggml_backend{};
    backend->guid = &guid;
    backend->iface.get_name = name_of;
    backend->iface.free = free_backend;
    backend->iface.graph_compute = compute_graph;
    backend->device = device;
    backend->context = new Backend;
    return backend;
}

void set_threads(ggml_backend_t backend, int num) { ((Backend *) backend->context)->threads = num; }

const char * registry_name(ggml_backend_reg_t) { return "quire"; }
size_t num_devices(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t device_at(ggml_backend_reg_t registry, size_t) {
    static ggml_backend_device device{};
    device.iface.get_name = device_name;
    device.iface.get_description = device_description;
    device.iface.get_memory = device_memory;
    device.iface.get_type = device_type;
    device.iface.get_props = device_props;
    device.iface.init_backend = open_backend;
    device.iface.get_buffer_type = device_buffers;
    device.iface.supports_op = supports;
    device.iface.supports_buft = supports_buffers;
    device.reg = registry;
    return &device;
}
void * procedure(ggml_backend_reg_t, const char * name) {
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *) set_threads : nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void quire_attention_use(bool use) {
    static ggml_backend_reg registry{GGML_BACKEND_API_VERSION, {registry_name, num_devices, device_at, procedure}, nullptr};
    static bool is_registered = false;
    if (use && !is_registered) {
        ggml_backend_register(&registry);
        is_registered = true;
    }
    is_used = use;
}
