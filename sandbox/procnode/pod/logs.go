package pod

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// LogOptions choose what of a container's output is wanted.
type LogOptions struct {
	// Previous means the container's former life.
	Previous bool
	Follow   bool
	// Tail is a number of lines, negative for all, and Limit one of bytes, 0
	// for all.
	Tail, Limit int
	// Since leaves out what is older; the zero time leaves out nothing.
	Since time.Time
}

// followEvery is how often a followed log is looked at.
const followEvery = 100 * time.Millisecond

// Logs is the output of a container, standard output and error in one.
func (p *Pod) Logs(ctx context.Context, name string, o LogOptions) (io.ReadCloser, error) {
	c := p.find(name)
	if c == nil {
		return nil, fmt.Errorf("container %q: %w", name, fs.ErrNotExist)
	}
	p.mu.Lock()
	restart := c.restarts
	p.mu.Unlock()
	if o.Previous {
		restart--
	}
	f, err := os.Open(c.logFile(restart))
	if err != nil {
		return nil, fmt.Errorf("log of container %s, start %d: %w", name, restart+1, err)
	}
	if err := o.seek(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	r, w := io.Pipe()
	go func() {
		defer f.Close()
		w.CloseWithError(c.copyLog(ctx, w, f, restart, o.Follow && !o.Previous))
	}()
	// A reader that goes away ends the copy.
	stop := context.AfterFunc(ctx, func() { _ = r.Close() })
	out := struct {
		io.Reader
		io.Closer
	}{io.Reader(r), closer(func() error { stop(); return r.Close() })}
	if o.Limit > 0 {
		out.Reader = io.LimitReader(r, int64(o.Limit))
	}
	return out, nil
}

type closer func() error

func (c closer) Close() error { return c() }

// copyLog copies what is there and, when followed, what comes until the
// process has ended.
func (c *container) copyLog(ctx context.Context, w io.Writer, f io.Reader, restart int32, follow bool) error {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		c.pod.mu.Lock()
		live := follow && c.restarts == restart && c.state.Running != nil
		c.pod.mu.Unlock()
		// Asked before the copy, so that the last words are in it.
		if _, err := io.Copy(w, f); err != nil || !live {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// seek puts the file before the lines that are wanted.
func (o LogOptions) seek(f *os.File) error {
	var tail, since int64
	if o.Tail >= 0 {
		end, err := f.Seek(0, io.SeekEnd)
		if err != nil {
			return err
		}
		if tail, err = lastLines(f, end, o.Tail); err != nil {
			return err
		}
	}
	if !o.Since.IsZero() {
		var err error
		if since, err = linesSince(f, o.Since); err != nil {
			return err
		}
	}
	_, err := f.Seek(max(tail, since), io.SeekStart)
	return err
}

// lastLines is where the last lines of a file's part up to end begin.
func lastLines(f io.ReaderAt, end int64, lines int) (int64, error) {
	const block = 64 << 10
	if lines == 0 {
		return end, nil
	}
	buffer := make([]byte, block)
	for at := end; at > 0; {
		size := min(at, block)
		at -= size
		if _, err := f.ReadAt(buffer[:size], at); err != nil {
			return 0, err
		}
		part := buffer[:size]
		if at+size == end {
			// The newline that ends the last line separates nothing.
			part = bytes.TrimSuffix(part, []byte("\n"))
		}
		for i := bytes.LastIndexByte(part, '\n'); i >= 0; i = bytes.LastIndexByte(part[:i], '\n') {
			if lines--; lines == 0 {
				return at + int64(i) + 1, nil
			}
		}
	}
	return 0, nil
}
