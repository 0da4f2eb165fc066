package cuda

import "fmt"

// The kernels, as PTX text that the driver compiles for its device.
const (
	kernelFMA   = "probe_fma"
	kernelFill  = "probe_fill"
	kernelCheck = "probe_check"
)

// ptxFor gives the text for a compute capability. The target is a floor: code
// for sm_X runs on X and every later one, so newer devices need none of
// their own; the version must be one that each driver able to run the device can read: 6.0
// came with CUDA 9.0, 6.3 with 10.0, 7.0 with 11.0. Low targets go to old
// devices only, because newer drivers may drop them.
func ptxFor(major, minor int) (text, name string) {
	version, target := "6.0", "sm_50"
	switch cc := major*10 + minor; {
	case cc >= 80:
		version, target = "7.0", "sm_80"
	case cc >= 75:
		version, target = "6.3", "sm_75"
	case cc >= 70:
		target = "sm_70"
	}
	return fmt.Sprintf(".version %s\n.target %s\n.address_size 64\n", version, target) + ptxFMA + ptxFill + ptxCheck, version + "/" + target
}

// word is the pattern of the memory test at word i; the two kernels compute the
// same. Every bit of the index reaches the word, so a swapped or mirrored
// address shows.
func word(i uint64, seed uint32) uint32 {
	v := uint32(i)*0x9E3779B1 ^ uint32(i>>32)
	return v ^ v>>15 ^ seed
}

// y[i] = x[i]*a + y[i], one element per thread.
const ptxFMA = `
.visible .entry probe_fma(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
	.reg .pred %out;
	.reg .f32 %f<4>;
	.reg .b32 %i, %n, %block, %width, %lane;
	.reg .b64 %x, %y, %at;
	mov.u32 %block, %ctaid.x;
	mov.u32 %width, %ntid.x;
	mov.u32 %lane, %tid.x;
	mad.lo.s32 %i, %block, %width, %lane;
	ld.param.u32 %n, [n];
	setp.ge.u32 %out, %i, %n;
	@%out bra FMA_END;
	ld.param.u64 %x, [x];
	ld.param.u64 %y, [y];
	ld.param.f32 %f0, [a];
	cvta.to.global.u64 %x, %x;
	cvta.to.global.u64 %y, %y;
	mul.wide.u32 %at, %i, 4;
	add.s64 %x, %x, %at;
	add.s64 %y, %y, %at;
	ld.global.f32 %f1, [%x];
	ld.global.f32 %f2, [%y];
	fma.rn.f32 %f3, %f1, %f0, %f2;
	st.global.f32 [%y], %f3;
FMA_END:
	ret;
}
`

// Both memory kernels walk the words with a stride of the whole grid: %at is
// the word's index, %v its pattern. -1640531535 is 0x9E3779B1.
const ptxWalk = `	.reg .pred %end, %same;
	.reg .b32 %block, %width, %lane, %grid, %low, %high, %v, %w, %seed, %old;
	.reg .b64 %base, %n, %at, %step, %t, %p, %bad;
	mov.u32 %block, %ctaid.x;
	mov.u32 %width, %ntid.x;
	mov.u32 %lane, %tid.x;
	mov.u32 %grid, %nctaid.x;
	ld.param.u64 %n, [n];
	ld.param.u32 %seed, [seed];
	ld.param.u64 %base, [words];
	cvta.to.global.u64 %base, %base;
	mul.wide.u32 %at, %block, %width;
	cvt.u64.u32 %t, %lane;
	add.s64 %at, %at, %t;
	mul.wide.u32 %step, %grid, %width;
`

const ptxWord = `	cvt.u32.u64 %low, %at;
	shr.u64 %t, %at, 32;
	cvt.u32.u64 %high, %t;
	mul.lo.s32 %v, %low, -1640531535;
	xor.b32 %v, %v, %high;
	shr.u32 %w, %v, 15;
	xor.b32 %v, %v, %w;
	xor.b32 %v, %v, %seed;
	shl.b64 %p, %at, 2;
	add.s64 %p, %base, %p;
`

const ptxFill = `
.visible .entry probe_fill(.param .u64 words, .param .u64 n, .param .u32 seed)
{
` + ptxWalk + `FILL_NEXT:
	setp.ge.u64 %end, %at, %n;
	@%end bra FILL_END;
` + ptxWord + `	st.global.u32 [%p], %v;
	add.s64 %at, %at, %step;
	bra FILL_NEXT;
FILL_END:
	ret;
}
`

// bad[0] counts the words that differ; bad[2..3] is the index of one of them.
const ptxCheck = `
.visible .entry probe_check(.param .u64 words, .param .u64 n, .param .u32 seed, .param .u64 bad)
{
` + ptxWalk + `	ld.param.u64 %bad, [bad];
	cvta.to.global.u64 %bad, %bad;
CHECK_NEXT:
	setp.ge.u64 %end, %at, %n;
	@%end bra CHECK_END;
` + ptxWord + `	ld.global.u32 %w, [%p];
	setp.eq.u32 %same, %w, %v;
	@%same bra CHECK_SAME;
	atom.global.add.u32 %old, [%bad], 1;
	st.global.u64 [%bad+8], %at;
CHECK_SAME:
	add.s64 %at, %at, %step;
	bra CHECK_NEXT;
CHECK_END:
	ret;
}
`
