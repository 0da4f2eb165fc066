package pod

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"sort"
	"time"
)

// A process writes its log itself and goes on when the node process is gone, so
// nobody sees a line come. Instead, the log's length is noted every second in a
// file beside it: lines are as old as the note before them.

// noteEvery is how exact the age of a line is.
const noteEvery = time.Second

// note is the length that a log had at a moment.
type note struct{ Nanoseconds, Bytes int64 }

// noteSize is what one takes in its file.
const noteSize = 16

func timesFile(log string) string { return log + ".times" }

// noteTimes notes how the container's present log grows until the context ends.
func (c *container) noteTimes(ctx context.Context) {
	c.pod.mu.Lock()
	log := c.logFile(c.restarts)
	c.pod.mu.Unlock()
	if err := noteGrowth(ctx, log); err != nil {
		c.pod.log.Error("the times of a log are not kept: lines since a moment will be too many", "log", log, "error", err)
	}
}

func noteGrowth(ctx context.Context, log string) error {
	times, err := os.OpenFile(timesFile(log), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer times.Close()
	end, err := times.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if _, err := times.Seek(end-end%noteSize, io.SeekStart); err != nil { // over a note that a crash has cut
		return err
	}
	tick := time.NewTicker(noteEvery)
	defer tick.Stop()
	for length, over := int64(-1), false; ; {
		is, err := os.Stat(log)
		if err != nil {
			return err
		}
		// After the length was asked: no line in it is younger.
		at := time.Now()
		if is.Size() != length {
			length = is.Size()
			if err := binary.Write(times, binary.BigEndian, note{at.UnixNano(), length}); err != nil {
				return err
			}
		}
		if over {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			over = true // its last lines age, too
		}
	}
}

// lengthAt is the length of a log of which it was noted, by a moment, that it
// had come; 0 where nothing was.
func lengthAt(log string, moment time.Time) (int64, error) {
	data, err := os.ReadFile(timesFile(log))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	// A note that a crash has cut is none.
	all := make([]note, len(data)/noteSize)
	if err := binary.Read(bytes.NewReader(data), binary.BigEndian, all); err != nil {
		return 0, err
	}
	after := sort.Search(len(all), func(i int) bool { return all[i].Nanoseconds > moment.UnixNano() })
	if after == 0 {
		return 0, nil
	}
	return all[after-1].Bytes, nil
}

// linesSince is where the lines begin that came since a moment. A line that was
// begun before is one of them.
func linesSince(f *os.File, moment time.Time) (int64, error) {
	length, err := lengthAt(f.Name(), moment)
	if err != nil || length == 0 {
		return 0, err
	}
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, length-1); err != nil {
		return 0, err
	}
	if last[0] == '\n' {
		return length, nil
	}
	return lastLines(f, length, 1)
}
