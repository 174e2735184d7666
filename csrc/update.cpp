// Optimizer updates of a stretch of elements. Compiled once per instruction set, as namespace INSTRUCTION_SET.
//
// The arithmetic is fp32 whatever the tensors hold, in the order of torch's fused optimizers, with fused multiply-adds
// where these have them. -ffp-contract=off keeps the compiler from adding others, so an element's result does not
// depend on its place in a vector.
#include "update.h"

#include <cmath>

#include "numbers.h"

namespace INSTRUCTION_SET {
namespace {

struct Nothing {};

inline void narrow(float, Nothing &) {}

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// a + weight * (b - a), from the nearer end: exact at weights 0 and 1.
inline float lerp(float a, float b, float weight) {
    return weight < 0.5f ? multiply_add(weight, b - a, a) : multiply_add(weight - 1.0f, b - a, b);
}

struct Adam {  // arXiv:1412.6980, with decoupled decay arXiv:1711.05101
    static constexpr bool has_second = true;
    static float step(const Update &how, const Tensor &tensor, float param, float grad, float &mean, float &square) {
        grad = multiply_add(param, how.penalty, grad);
        mean = lerp(mean, grad, how.rest1);
        square = multiply_add(how.rest2 * grad, grad, square * how.beta2);
        const float denominator = std::sqrt(square) / tensor.root_correction + how.eps;
        return param * how.shrink - tensor.step_size * mean / denominator;
    }
};

struct Adagrad {  // jmlr.org/papers/v12/duchi11a.html
    static constexpr bool has_second = false;
    static float step(const Update &how, const Tensor &tensor, float param, float grad, float &sum, float &) {
        grad = multiply_add(param, how.penalty, grad);
        sum = multiply_add(grad, grad, sum);
        return param - tensor.step_size * grad / (std::sqrt(sum) + how.eps);
    }
};

struct Lion {  // arXiv:2302.06675, algorithm 2
    static constexpr bool has_second = false;
    static float step(const Update &how, const Tensor &tensor, float param, float grad, float &mean, float &) {
        const float direction = lerp(mean, grad, how.rest1);
        const float sign = float(direction > 0.0f) - float(direction < 0.0f);  // of a nan 0, as torch.sign
        mean = lerp(mean, grad, how.rest2);
        return param * how.shrink - tensor.step_size * sign;
    }
};

template <class T> T *at(void *base, int64_t offset) { return static_cast<T *>(base) + offset; }

template <class R, class P, class G, class S, class C>
void update_range(const Update &how, const Tensor &tensor, int64_t begin, int64_t end) {
    constexpr bool has_copy = !__is_same(C, Nothing);
    P *__restrict param = at<P>(tensor.param, begin);
    const G *__restrict grad = static_cast<const G *>(tensor.grad) + begin;
    S *__restrict first = at<S>(tensor.first, begin);
    S *__restrict second = R::has_second ? at<S>(tensor.second, begin) : nullptr;
    C *__restrict copy = has_copy ? at<C>(tensor.copy, begin) : nullptr;
    const Update local = how;  // on the stack: stores to the arrays cannot change it
    const Tensor scalars = tensor;
#pragma GCC ivdep
    for (int64_t i = 0; i < end - begin; i++) {
        float state1 = widen(first[i]), state2 = R::has_second ? widen(second[i]) : 0.0f;
        const float value = R::step(local, scalars, widen(param[i]), widen(grad[i]), state1, state2);
        narrow(value, param[i]);
        narrow(state1, first[i]);
        if (R::has_second) narrow(state2, second[i]);
        if (has_copy) narrow(value, copy[i]);
    }
}

// fp32 parameters with gradients of any dtype and a copy or none; 16-bit ones with gradients of their own dtype.
template <class R, class S> RangeFunction of_state(const Update &how) {
    const auto with_copy = [&](auto grad) -> RangeFunction {
        using G = decltype(grad);
        if (how.copy == none) return update_range<R, float, G, S, Nothing>;
        if (how.copy == bfloat16) return update_range<R, float, G, S, BFloat16>;
        if (how.copy == float16) return update_range<R, float, G, S, Float16>;
        return nullptr;
    };
    if (how.param == float32 && how.grad == float32) return with_copy(float());
    if (how.param == float32 && how.grad == bfloat16) return with_copy(BFloat16());
    if (how.param == float32 && how.grad == float16) return with_copy(Float16());
    if (how.param != how.grad || how.copy != none) return nullptr;
    if (how.param == bfloat16) return update_range<R, BFloat16, BFloat16, S, Nothing>;
    if (how.param == float16) return update_range<R, Float16, Float16, S, Nothing>;
    return nullptr;
}

template <class R> RangeFunction of_rule(const Update &how) {
    if (how.state == float32) return of_state<R, float>(how);
    if (how.state == bfloat16) return of_state<R, BFloat16>(how);
    return nullptr;
}

}  // namespace

RangeFunction find_range_function(const Update &how) {
    switch (how.rule) {
        case adam: return of_rule<Adam>(how);
        case adagrad: return of_rule<Adagrad>(how);
        case lion: return of_rule<Lion>(how);
    }
    return nullptr;
}

}  // namespace INSTRUCTION_SET
