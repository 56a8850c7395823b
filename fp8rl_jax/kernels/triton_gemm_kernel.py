"""The Triton kernel of `triton_gemm.scaled_gemm`, which imports it when called."""

import triton
import triton.language as tl


@triton.jit
def _as_operand(codes):
    """Codes as `tl.dot` takes them; uint8 ones become float16, exactly."""
    if codes.dtype == tl.uint8:
        # The sign goes to bit 15 and, unwanted, 14; exponent and mantissa to 13..7,
        # where float16 reads 2^-8 of the value, subnormal numbers included.
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
        return bits.to(tl.float16, bitcast=True) * 256.0
    else:
        return codes


@triton.jit
def scaled_gemm_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    M,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    B_BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_DOTS: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One [BLOCK_M * NUM_DOTS, BLOCK_N] piece of out = a b^T.

    Arguments as in `triton_gemm.scaled_gemm` and `triton_gemm.Tile`; codes are e4m3, or
    uint8 where the GPU has no e4m3. The grid is one-dimensional, one program per piece.
    """
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = BLOCK_M * NUM_DOTS
    # Programs walk down GROUP_M row blocks before they move on by a column block.
    pid = tl.program_id(0)
    first_m = pid // (GROUP_M * NUM_N) * GROUP_M
    height = tl.minimum((M + ROWS - 1) // ROWS - first_m, GROUP_M)
    within = pid % (GROUP_M * NUM_N)
    m_start = (first_m + within % height) * ROWS
    n_start = within // height * BLOCK_N

    # 64-bit only here: offsets within a program's rows fit 32 bits.
    a_ptr += m_start.to(tl.int64) * K
    b_ptr += n_start.to(tl.int64) * K
    out_ptr += m_start.to(tl.int64) * N + n_start
    a_scales_ptr += m_start
    if B_BLOCK_ROWS == 1:
        b_scales_ptr += n_start
    else:
        b_scales_ptr += n_start // 128 * NUM_BLOCKS

    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, 128)
    a_offsets = m[:, None] * K + k[None, :]
    b_offsets = n[None, :] * K + k[:, None]
    # The constant disjuncts fold away masks that are not needed.
    n_mask = (n < N - n_start) | (N % BLOCK_N == 0)

    accumulators = ()
    for _ in tl.static_range(NUM_DOTS):
        accumulators += (tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32),)
    for block in range(NUM_BLOCKS):
        k_mask = (k < K - block * 128) | (K % 128 == 0)
        b = tl.load(b_ptr + b_offsets, n_mask[None, :] & k_mask[:, None], 0.0)
        if B_BLOCK_ROWS == 1:
            b_scale = tl.load(b_scales_ptr + n, n_mask, 0.0)[None, :]
            b_scales_ptr += N
        else:
            b_scale = tl.load(b_scales_ptr)
            b_scales_ptr += 1
        sums = ()
        for i in tl.static_range(NUM_DOTS):
            m_mask = m < M - m_start - i * BLOCK_M
            a = tl.load(
                a_ptr + i * BLOCK_M * K + a_offsets,
                m_mask[:, None] & k_mask[None, :],
                0.0,
            )
            a_scale = tl.load(a_scales_ptr + i * BLOCK_M + m, m_mask, 0.0)[:, None]
            # A dot of its own per block: Hopper's accumulator keeps about 14 bits.
            product = tl.dot(_as_operand(a), _as_operand(b))
            sums += (accumulators[i] + product * (a_scale * b_scale),)
        accumulators = sums
        a_ptr += 128
        b_ptr += 128
        a_scales_ptr += M

    out_offsets = m[:, None] * N + n[None, :]
    for i in tl.static_range(NUM_DOTS):
        m_mask = m < M - m_start - i * BLOCK_M
        tl.store(
            out_ptr + i * BLOCK_M * N + out_offsets,
            accumulators[i].to(out_ptr.dtype.element_ty),
            m_mask[:, None] & (n < N - n_start)[None, :],
        )
