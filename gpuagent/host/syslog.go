package host

import (
	"errors"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// timed marks a sequence that is a time: the system call syslog(2) gives no
// record numbers. A baseline of the one kind says nothing about a log of the
// other, which then counts from its start.
const timed uint64 = 1 << 62

// Actions of syslog(2).
const (
	syslogReadAll    = 3
	syslogSizeBuffer = 10
)

// ring reads the kernel's ring buffer by system call. That needs the
// capability SYSLOG alone, where /dev/kmsg is a device that a container may
// open only when it is privileged.
func ring(refused error) ([]record, error) {
	if !errors.Is(refused, os.ErrPermission) {
		return nil, refused
	}
	size, err := unix.Klogctl(syslogSizeBuffer, nil)
	if err != nil {
		return nil, errors.Join(refused, os.NewSyscallError("syslog", err))
	}
	buf := make([]byte, size)
	n, err := unix.Klogctl(syslogReadAll, buf)
	if err != nil {
		return nil, errors.Join(refused, os.NewSyscallError("syslog", err))
	}
	return ringRecords(string(buf[:n])), nil
}

// ringLine is "<priority>[seconds.microseconds] text"; some kernels name the
// caller, a thread or a processor, behind the stamp: [T17] or [C3].
var ringLine = regexp.MustCompile(`^<\d+>\[ *(\d+)\.(\d{6})\](?:\[ *[TC]\d+\])? (.*)$`)

// ringRecords parses the buffer. A line without a stamp is the rest of the one
// before, or one that was cut off: neither begins an Xid.
func ringRecords(text string) []record {
	var out []record
	for line := range strings.Lines(text) {
		m := ringLine.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		micros, err := strconv.ParseUint(m[1]+m[2], 10, 62)
		if err != nil {
			continue
		}
		out = append(out, record{sequence: timed | micros, at: time.Duration(micros) * time.Microsecond, text: m[3]})
	}
	return out
}

// sameKind is since where it was taken from a log of the records' kind, else
// the start.
func sameKind(since uint64, records []record) uint64 {
	if len(records) > 0 && (since^records[0].sequence)&timed != 0 {
		return 0
	}
	return since
}
