"""A library that fits quire as llama.cpp's does, and answers nothing: its header and its source in C."""

import shutil
import subprocess

from quire.engines.gguf import library

HEADER = """
#include <stdbool.h>
#include <stdint.h>
#define LLAMA_STATE_SEQ_VERSION 4
struct llama_model_params { int32_t n_gpu_layers; void * progress_callback; bool vocab_only; };
struct llama_context_params {
    uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; // comments are read over
    int32_t n_threads; int32_t n_threads_batch; enum llama_flash_attn_type flash_attn_type;
    enum ggml_type type_k; enum ggml_type type_v; bool offload_kqv; bool swa_full; bool kv_unified; };
struct llama_batch { int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id;
    int32_t ** seq_id; int8_t * logits; };
"""
SOURCE = """
enum llama_flash_attn_type { A }; enum ggml_type { B };
#include "llama.h"
struct llama_model_params llama_model_default_params(void) { return (struct llama_model_params){0}; }
struct llama_context_params llama_context_default_params(void) {
    return (struct llama_context_params){.n_batch = 2048, .n_ubatch = 512, .n_seq_max = 1, .type_k = 1, .type_v = 1,
                                         .offload_kqv = true}; }
const char * llama_version(void) { return "a small one"; }
void llama_model_load_from_file(void) {}
void llama_init_from_model(void) {}
void llama_decode(void) {}
bool llama_supports_gpu_offload(void) { return false; }
"""


def source(more=""):
    """The library's source, with further lines of C."""
    own = {*library._FUNCTIONS} - {"llama_supports_gpu_offload"}
    return SOURCE + "".join(f"void {name}(void) {{}}\n" for name in sorted(own)) + more


def compiled(path, more=""):
    """Compile the library to a file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "llama.h").write_text(HEADER)
    (path.parent / "llama.c").write_text(source(more))
    command = [shutil.which("cc"), "-shared", "-fPIC", "-w", "-o", path, path.parent / "llama.c"]
    subprocess.run(command, check=True)
    for name in ("llama.h", "llama.c"):
        (path.parent / name).unlink()
    return path
