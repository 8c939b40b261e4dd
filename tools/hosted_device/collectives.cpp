// Collectives for tensors on the device: those of another backend, which takes tensors of the CPU.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include "device.h"

namespace hosted {
namespace {

using Tensors = std::vector<at::Tensor>;
using Done = c10::intrusive_ptr<c10d::Work>;

Tensors all_on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& each : tensors) found.push_back(on_host(each));
  return found;
}

std::vector<Tensors> all_on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (const auto& each : lists) found.push_back(all_on_host(each));
  return found;
}

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(const c10::intrusive_ptr<c10d::Backend>& of_host)
      : Backend(of_host->getRank(), of_host->getSize()), host_(of_host) {}

  const std::string getBackendName() const override { return "hosted_gloo"; }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { host_->setTimeout(timeout); }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto given = all_on_host(tensors);
    return host_->broadcast(given, options);
  }
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto given = all_on_host(tensors);
    return host_->allreduce(given, options);
  }
  Done allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto given = all_on_host(tensors);
    return host_->allreduce_coalesced(given, options);
  }
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto given = all_on_host(tensors);
    return host_->reduce(given, options);
  }
  Done allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = all_on_host(out);
    auto from = all_on_host(in);
    return host_->allgather(to, from, options);
  }
  Done _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return host_->_allgather_base(to, from, options);
  }
  Done allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = all_on_host(out), from = all_on_host(in);
    return host_->allgather_into_tensor_coalesced(to, from, options);
  }
  Done gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto to = all_on_host(out);
    auto from = all_on_host(in);
    return host_->gather(to, from, options);
  }
  Done scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto to = all_on_host(out);
    auto from = all_on_host(in);
    return host_->scatter(to, from, options);
  }
  Done reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto to = all_on_host(out);
    auto from = all_on_host(in);
    return host_->reduce_scatter(to, from, options);
  }
  Done _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return host_->_reduce_scatter_base(to, from, options);
  }
  Done reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    auto to = all_on_host(out), from = all_on_host(in);
    return host_->reduce_scatter_tensor_coalesced(to, from, options);
  }
  Done alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_sizes,
      std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return host_->alltoall_base(to, from, out_sizes, in_sizes, options);
  }
  Done alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    auto to = all_on_host(out), from = all_on_host(in);
    return host_->alltoall(to, from, options);
  }
  Done send(Tensors& tensors, int rank, int tag) override {
    auto given = all_on_host(tensors);
    return host_->send(given, rank, tag);
  }
  Done recv(Tensors& tensors, int rank, int tag) override {
    auto given = all_on_host(tensors);
    return host_->recv(given, rank, tag);
  }
  Done barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }

 private:
  c10::intrusive_ptr<c10d::Backend> host_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", &begin);
  m.def("devices", [] { return static_cast<int>(devices()); });
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init<const c10::intrusive_ptr<c10d::Backend>&>());
}

}  // namespace hosted
