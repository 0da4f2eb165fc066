package host

import (
	"errors"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// KernelLog is what the kernel said of the GPUs after a given record.
type KernelLog struct {
	Visible bool `json:"visible"`
	// Why is set when it is not.
	Why  string `json:"why,omitempty"`
	Last uint64 `json:"last"`
	// Lost: records after the given one, or after the boot where none was given,
	// were overwritten before they were read.
	Lost bool  `json:"lost,omitempty"`
	Xids []Xid `json:"xids,omitempty"`
	// Unreadable are lines that look like an Xid and are none.
	Unreadable []string `json:"unreadable,omitempty"`
	// Loaded is when, after the boot, the kernel module last came up.
	Loaded time.Duration `json:"loaded,omitempty"`
}

// Xid is one error report of the driver.
type Xid struct {
	PCI string `json:"pci"`
	// Instance is the MIG instance that the driver blames, as it writes it:
	// GPU-I:05 GPU-CI:00; empty where it blames the whole GPU.
	Instance string `json:"instance,omitempty"`
	Number   int    `json:"number"`
	Text     string `json:"text,omitempty"`
}

var (
	xidLine    = regexp.MustCompile(`NVRM: Xid \(PCI:([0-9a-fA-F:.]+)((?: GPU-C?I:\d+)*)\): (\d+)(?:, (.*))?`)
	loadedLine = regexp.MustCompile(`NVRM: loading NVIDIA`)
	stamp      = regexp.MustCompile(`^\[ *(\d+\.\d+)\] `)
)

// kernelLog reads /dev/kmsg from its start without waiting for more. A plain
// file of lines, as dmesg prints them, is read the same way, with the line's
// number as sequence.
func (h Host) kernelLog(since uint64) KernelLog {
	records, err := kmsg(h.path("dev/kmsg"))
	if err != nil {
		records, err = ring(err)
	}
	if err != nil {
		return KernelLog{Why: "kernel log: " + err.Error()}
	}
	since = sameKind(since, records)
	log := KernelLog{Visible: true, Last: since, Lost: lost(since, records)}
	for _, r := range records {
		if loadedLine.MatchString(r.text) {
			log.Loaded = r.at
		}
		log.Last = max(log.Last, r.sequence)
		if r.sequence <= since || !strings.Contains(r.text, "NVRM: Xid") {
			continue
		}
		m := xidLine.FindStringSubmatch(r.text)
		if m == nil {
			log.Unreadable = append(log.Unreadable, r.text)
			continue
		}
		number, err := strconv.Atoi(m[3])
		if err != nil {
			log.Unreadable = append(log.Unreadable, r.text)
			continue
		}
		log.Xids = append(log.Xids, Xid{PCI: Address(m[1]), Instance: strings.TrimSpace(m[2]), Number: number, Text: m[4]})
	}
	return log
}

// bootTime is how late the first line of a whole log may be: the kernel's clock
// stands at 0 when it prints it.
const bootTime = time.Second

// lost reports whether records after since, or after the boot, are missing: at
// the start, where the ring has been overwritten or cleared, or between two, where
// one was overwritten while we read.
func lost(since uint64, records []record) bool {
	if len(records) == 0 {
		return true // a kernel has always said something
	}
	first := records[0]
	if first.sequence&timed != 0 {
		// Times have no order without gaps: the last known line must be there.
		return since == 0 && first.at > bootTime || since > 0 && first.sequence > since
	}
	next := since + 1
	for _, r := range records {
		if r.sequence > next {
			return true
		}
		next = max(next, r.sequence+1)
	}
	return false
}

// Address writes a PCI address as sysfs does: 0000:03:00.0. The log leaves the
// function out, NVML writes a domain of eight digits.
func Address(s string) string {
	s = strings.ToLower(s)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	if domain, rest, ok := strings.Cut(s, ":"); ok && len(domain) > 4 {
		s = domain[len(domain)-4:] + ":" + rest
	}
	return s
}

// record is one line with its number and its time after the boot.
type record struct {
	sequence uint64
	at       time.Duration
	text     string
}

func kmsg(path string) ([]record, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		return plainLog(path)
	}
	var records []record
	// The kernel gives one record a read; 8192 bytes is its greatest.
	buf := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EAGAIN) || n == 0 && err == nil:
			return records, nil
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EINTR):
			// A record was overwritten while we read; the next follows.
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		default:
			if r, ok := kmsgRecord(string(buf[:n])); ok {
				records = append(records, r)
			}
		}
	}
}

// kmsgRecord parses "priority,sequence,microseconds,flags;text".
func kmsgRecord(s string) (record, bool) {
	head, text, ok := strings.Cut(s, ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 3 {
		return record{}, false
	}
	sequence, err1 := strconv.ParseUint(fields[1], 10, 64)
	micros, err2 := strconv.ParseInt(fields[2], 10, 64)
	if err1 != nil || err2 != nil {
		return record{}, false
	}
	text, _, _ = strings.Cut(text, "\n")
	// Sequences begin at 0; 0 means "nothing known" to our callers.
	return record{sequence: sequence + 1, at: time.Duration(micros) * time.Microsecond, text: text}, true
}

func plainLog(path string) ([]record, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	var records []record
	for line := range strings.Lines(string(b)) {
		line = strings.TrimRight(line, "\r\n")
		r := record{sequence: uint64(len(records) + 1), text: line}
		if m := stamp.FindStringSubmatch(line); m != nil {
			if s, err := strconv.ParseFloat(m[1], 64); err == nil {
				r.at = time.Duration(s * float64(time.Second))
			}
			r.text = line[len(m[0]):]
		}
		records = append(records, r)
	}
	return records, nil
}
