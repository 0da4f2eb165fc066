package cuda

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"
)

// elements of the arithmetic proof: enough for every multiprocessor of a large
// GPU to take part.
const elements = 1 << 20

// multiply runs y = 3x + y over small integers, which single precision holds
// exactly: every element must be equal, not near.
func (s *session) multiply(context.Context) error {
	const size = 4 * elements
	dx, err := s.alloc(size)
	if err != nil {
		return err
	}
	dy, err := s.alloc(size)
	if err != nil {
		return err
	}
	hx, err := s.pinned(size)
	if err != nil {
		return err
	}
	hy, err := s.pinned(size)
	if err != nil {
		return err
	}
	x, y := unsafe.Slice((*float32)(hx), elements), unsafe.Slice((*float32)(hy), elements)
	for i := range x {
		x[i], y[i] = float32(i%1024), float32(i%77)
	}
	if err := s.check("cuMemcpyHtoDAsync", s.copyToDevice(dx, hx, size, s.stream)); err != nil {
		return err
	}
	if err := s.check("cuMemcpyHtoDAsync", s.copyToDevice(dy, hy, size, s.stream)); err != nil {
		return err
	}
	factor, count := float32(3), uint32(elements)
	if err := s.launch(kernelFMA, elements/256, 256, unsafe.Pointer(&dx), unsafe.Pointer(&dy), unsafe.Pointer(&factor), unsafe.Pointer(&count)); err != nil {
		return err
	}
	if err := s.check("cuMemcpyDtoHAsync", s.copyToHost(hy, dy, size, s.stream)); err != nil {
		return err
	}
	if err := s.wait(kernelFMA); err != nil {
		return err
	}
	for i := range y {
		if want := 3*float32(i%1024) + float32(i%77); y[i] != want {
			return fmt.Errorf("wrong result: element %d is %v, not %v", i, y[i], want)
		}
	}
	return nil
}

// seeds of the memory test: the words as they are, their complement, and a mix
// of both.
var seeds = []uint32{0, 0xFFFFFFFF, 0x5A5A1234}

// patterns fills memory, checks it on the device, and once more in three words
// of each block on the host: a device that is wrong in the same way when it
// writes and when it checks is not believed.
func (s *session) patterns(ctx context.Context) error {
	bad, err := s.alloc(16)
	if err != nil {
		return err
	}
	answer, err := s.pinned(answerSize)
	if err != nil {
		return err
	}
	// The copies need memory too.
	defer s.releaseTo(len(s.undo))
	blocks, err := s.memory()
	if err != nil {
		return err
	}
	test := memoryTest{blocks: blocks, bad: bad, answer: answer}
	began := time.Now()
	for {
		seed := seeds[s.out.Patterns%len(seeds)] ^ uint32(s.out.Patterns/len(seeds))*0x01000193
		if err := s.pattern(test, seed); err != nil {
			return err
		}
		s.out.Patterns++
		if took := time.Since(began); s.out.Patterns >= len(seeds) && (ctx.Err() != nil || took >= s.req.Soak) {
			if s.req.Soak > 0 {
				s.out.Soaked = took
			}
			return nil
		}
	}
}

// memoryBlocks bounds how many pieces the tested memory is taken in.
const memoryBlocks = 64

// memory takes what was asked for, in pieces where it cannot be had in one, or
// less where the device is shared and another program was faster.
func (s *session) memory() ([]memoryBlock, error) {
	size := s.req.MemoryBytes
	if size == 0 {
		size = uint64(float64(s.out.FreeBytes) * min(s.req.MemoryShare, 0.95))
	}
	size = max(size&^(minMemory-1), minMemory)
	s.out.WantedBytes = size
	// A tenth of what is free stays free for the tenants beside the probe, unless
	// the plan asks for a larger share.
	if s.req.MemoryBytes > 0 {
		size = min(size, s.out.FreeBytes/10*9&^(minMemory-1))
	}
	if size < minMemory || s.out.FreeBytes < minMemory {
		return nil, fmt.Errorf("only %d MiB of device memory are free: %s", s.out.FreeBytes>>20, whoKeeps)
	}
	var blocks []memoryBlock
	for piece := size; s.out.TestedBytes < size && len(blocks) < memoryBlocks; {
		piece = min(piece, size-s.out.TestedBytes)
		p, err := s.alloc(piece)
		var refused *cudaError
		switch {
		case err == nil:
			blocks = append(blocks, memoryBlock{p, piece / 4})
			s.out.TestedBytes += piece
		case !errors.As(err, &refused) || refused.code != codeOutOfMemory:
			return nil, err
		case piece > minMemory:
			piece = max(piece/2&^(minMemory-1), minMemory)
		case len(blocks) == 0:
			return nil, fmt.Errorf("%w; %d MiB of device memory were free: %s", err, s.out.FreeBytes>>20, whoKeeps)
		default:
			return blocks, nil
		}
	}
	return blocks, nil
}

// whoKeeps is the hint for a device that is full.
const whoKeeps = "drain the host or look for a process that keeps it"

// memoryBlock is a piece of the tested memory.
type memoryBlock struct {
	at    devicePtr
	words uint64
}

type memoryTest struct {
	blocks []memoryBlock
	bad    devicePtr
	answer unsafe.Pointer
}

// The pinned answer: count of bad words, one bad word's index, three samples.
const (
	samples    = 3
	answerSize = 16 + 4*samples
)

// pattern fills all blocks before it checks the first: a write that lands in
// another block is found there.
func (s *session) pattern(t memoryTest, seed uint32) error {
	for _, b := range t.blocks {
		if err := s.launch(kernelFill, s.grid(), 256, unsafe.Pointer(&b.at), unsafe.Pointer(&b.words), unsafe.Pointer(&seed)); err != nil {
			return err
		}
	}
	for i, b := range t.blocks {
		if err := s.verify(t, b, seed); err != nil {
			return fmt.Errorf("block %d of %d: %w", i+1, len(t.blocks), err)
		}
	}
	return nil
}

func (s *session) grid() uint32 { return uint32(max(s.out.Processors, 1) * 8) }

func (s *session) verify(t memoryTest, b memoryBlock, seed uint32) error {
	if err := s.check("cuMemsetD32Async", s.set32(t.bad, 0, 4, s.stream)); err != nil {
		return err
	}
	if err := s.launch(kernelCheck, s.grid(), 256, unsafe.Pointer(&b.at), unsafe.Pointer(&b.words), unsafe.Pointer(&seed), unsafe.Pointer(&t.bad)); err != nil {
		return err
	}
	if err := s.check("cuMemcpyDtoHAsync", s.copyToHost(t.answer, t.bad, 16, s.stream)); err != nil {
		return err
	}
	at := [samples]uint64{0, b.words / 2, b.words - 1}
	for i, word := range at {
		if err := s.check("cuMemcpyDtoHAsync", s.copyToHost(unsafe.Add(t.answer, 16+4*i), b.at+devicePtr(word*4), 4, s.stream)); err != nil {
			return err
		}
	}
	if err := s.wait("the memory pattern"); err != nil {
		return err
	}
	if n := *(*uint32)(t.answer); n > 0 {
		s.out.BadWords += uint64(n)
		index := *(*uint64)(unsafe.Add(t.answer, 8))
		return fmt.Errorf("memory pattern %#x: %d bad words, one at byte %d of %d", seed, n, index*4, b.words*4)
	}
	for i, index := range at {
		if got := *(*uint32)(unsafe.Add(t.answer, 16+4*i)); got != word(index, seed) {
			s.out.BadWords++
			return fmt.Errorf("memory pattern %#x: the device finds no bad word, but the word at byte %d is %#x on the host, not %#x", seed, index*4, got, word(index, seed))
		}
	}
	return nil
}

// hostBlock is what one timed copy over PCIe moves: large against its start-up,
// small against pinned memory of a host.
const hostBlock = 64 << 20

// copies times three directions by events on the stream.
func (s *session) copies(context.Context) error {
	half := uint64(hostBlock)
	from, err := s.alloc(2 * half)
	for err != nil && half > minMemory {
		half /= 2
		from, err = s.alloc(2 * half)
	}
	if err != nil {
		return err
	}
	to := from + devicePtr(half)
	host, err := s.pinned(half)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		into  *float64
		name  string
		times int
		bytes uint64 // moved by one copy: a copy on the device reads and writes
		run   func() cuResult
	}{
		{&s.out.Bandwidth.DeviceToDevice, "cuMemcpyDtoDAsync", 20, 2 * half, func() cuResult { return s.copyOnDevice(to, from, half, s.stream) }},
		{&s.out.Bandwidth.HostToDevice, "cuMemcpyHtoDAsync", 10, half, func() cuResult { return s.copyToDevice(from, host, half, s.stream) }},
		{&s.out.Bandwidth.DeviceToHost, "cuMemcpyDtoHAsync", 10, half, func() cuResult { return s.copyToHost(host, from, half, s.stream) }},
	} {
		ms, err := s.timed(c.name, c.times, c.run)
		if err != nil {
			return err
		}
		if ms > 0 {
			*c.into = float64(c.bytes) * float64(c.times) / ms / 1e6
		}
	}
	return nil
}

// timed copies once to warm up, then measures.
func (s *session) timed(name string, times int, run func() cuResult) (ms float64, err error) {
	var events [2]handle
	for i := range events {
		if err := s.check("cuEventCreate", s.eventCreate(&events[i], 0)); err != nil {
			return 0, err
		}
		defer s.eventDestroy(events[i])
	}
	if err := s.check(name, run()); err != nil {
		return 0, err
	}
	if err := s.check("cuEventRecord", s.eventRecord(events[0], s.stream)); err != nil {
		return 0, err
	}
	for range times {
		if err := s.check(name, run()); err != nil {
			return 0, err
		}
	}
	if err := s.check("cuEventRecord", s.eventRecord(events[1], s.stream)); err != nil {
		return 0, err
	}
	if err := s.check("cuEventSynchronize after "+name, s.eventSynchronize(events[1])); err != nil {
		return 0, err
	}
	var elapsed float32
	err = s.check("cuEventElapsedTime", s.eventElapsed(&elapsed, events[0], events[1]))
	return float64(elapsed), err
}

// limit allocates above the workload's limit, which must be refused; the runs
// before have shown that below it the device works.
func (s *session) limit(context.Context) error {
	size := s.req.LimitBytes + limitStep
	var p devicePtr
	code := s.memAlloc(&p, size)
	switch code {
	case 0:
		s.memFree(p)
		s.out.LimitFound = fmt.Sprintf("%d MiB were granted, the limit is %d MiB", size>>20, s.req.LimitBytes>>20)
		return nil
	case codeOutOfMemory:
		s.out.Refused = true
		s.out.LimitFound = fmt.Sprintf("%d MiB were refused, the limit is %d MiB", size>>20, s.req.LimitBytes>>20)
		return nil
	}
	return s.check(fmt.Sprintf("cuMemAlloc of %d MiB", size>>20), code)
}
