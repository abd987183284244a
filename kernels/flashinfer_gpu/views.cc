// Calls FlashInfer's attention over pages on our pool, in which the keys and the values of a head
// lie side by side: [N, page, 2K, D], row 2h the keys of head h, row 2h + 1 its values. FlashInfer
// takes keys and values as two tensors with strides, and nothing for what it does not use, neither
// of which a call out of XLA can say. No Python runs here: a step waits for no interpreter lock.

#include <tvm/ffi/tvm_ffi.h>

namespace ffi = tvm::ffi;

namespace {

// One of a pool's two tensors, [N, page, K, D].
struct Half {
  int64_t shape[4];
  int64_t strides[4];
  DLTensor tensor;

  // row: 0 for keys, 1 for values.
  Half(ffi::TensorView pool, int64_t row) {
    const int64_t dim = pool.size(3);
    for (int axis = 0; axis < 4; ++axis) {
      shape[axis] = pool.size(axis);
      strides[axis] = pool.stride(axis);
    }
    shape[2] /= 2;
    strides[2] *= 2;
    const int64_t bytes = row * dim * (pool.dtype().bits / 8);
    tensor.data = static_cast<char*>(pool.data_ptr()) + bytes;
    tensor.device = pool.device();
    tensor.ndim = 4;
    tensor.dtype = pool.dtype();
    tensor.shape = shape;
    tensor.strides = strides;
    tensor.byte_offset = 0;
  }
  Half(const Half&) = delete;
};

constexpr int64_t kCausal = 1;         // the mask: a row sees keys up to its own position
constexpr int64_t kPositionsFirst = 0;  // the layout: [page, position, head, dim]

}  // namespace

// The kernel `run` (paged_run of a module of FlashInfer) as a function of what a step has.
// hopper: of the modules "fa3", which take other options at the end than "fa2".
ffi::Function over_pool(ffi::Function run, bool hopper) {
  return ffi::Function::FromTyped(
      [run, hopper](ffi::TensorView q, ffi::TensorView pool, ffi::TensorView workspace,
                    ffi::TensorView q_starts, ffi::TensorView page_starts, ffi::TensorView pages,
                    ffi::TensorView last_lengths, ffi::TensorView o, ffi::Array<int64_t> fields,
                    int64_t window_left, double softcap, double scale) {
        Half keys(pool, 0), values(pool, 1);
        ffi::TensorView k(&keys.tensor), v(&values.tensor);
        // The first workspace is for parts of contexts, of which there are none: not touched.
        if (hopper) {
          run(workspace, workspace, fields, q, k, v, q_starts, page_starts, pages, last_lengths, o,
              nullptr, kCausal, kPositionsFirst, window_left, false,
              // prefix lengths, positions in items, longest items, scales of values
              nullptr, nullptr, nullptr, nullptr, softcap, scale,
              1.0,          // one scale of all values
              int64_t(0));  // positions in items
        } else {
          run(workspace, workspace, fields, q, k, v, q_starts, page_starts, pages, last_lengths, o,
              nullptr, kCausal, kPositionsFirst, window_left, false,
              // masks and where they begin, slopes, prefix lengths, positions in items, longest
              // items, scales of keys and of values
              nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, softcap,
              scale,
              1.0, 1.0,     // rotation, which was done before
              int64_t(0));  // positions in items
        }
      });
}
