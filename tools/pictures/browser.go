package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// shot asks for one picture of a page.
type shot struct {
	url           string
	until         string // text that must be on the page
	width, height int
	limit         time.Duration
}

// flags keep the browser from doing anything but showing the page.
var flags = []string{
	"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
	"--disable-background-networking", "--disable-component-update", "--disable-sync",
	"--hide-scrollbars", "--remote-debugging-pipe",
}

// browser is a headless Chromium that is spoken to over two pipes, one JSON
// message each, ended by a zero byte.
type browser struct {
	cmd     *exec.Cmd
	out     *os.File
	in      *bufio.Reader
	session string
	last    int
}

// photograph shows the page, waits for its text and returns a PNG. Waiting is
// for the text, not for silence on the network: the page polls for ever.
func photograph(ctx context.Context, program string, s shot) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	profile, err := os.MkdirTemp("", "refit-pictures-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(profile)
	b, err := open(ctx, program, profile)
	if err != nil {
		return nil, err
	}
	defer b.close()
	png, err := b.photograph(s)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("page %s did not show %q within %s", s.url, s.until, s.limit)
	}
	return png, err
}

func open(ctx context.Context, program, profile string) (*browser, error) {
	theirs, ours, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	answers, writes, err := os.Pipe()
	if err != nil {
		ours.Close()
		return nil, err
	}
	defer writes.Close()
	cmd := exec.CommandContext(ctx, program, append(flags, "--user-data-dir="+profile)...)
	cmd.ExtraFiles = []*os.File{theirs, writes} // the browser's descriptors 3 and 4
	if err := cmd.Start(); err != nil {
		ours.Close()
		answers.Close()
		return nil, fmt.Errorf("starting %s: %w", program, err)
	}
	return &browser{cmd: cmd, out: ours, in: bufio.NewReader(answers)}, nil
}

func (b *browser) close() {
	b.out.Close()
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait() // it was killed: that is no news
}

func (b *browser) photograph(s shot) ([]byte, error) {
	var target struct{ TargetID string }
	if err := b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target); err != nil {
		return nil, err
	}
	var attached struct{ SessionID string }
	if err := b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached); err != nil {
		return nil, err
	}
	b.session = attached.SessionID
	size := map[string]any{"width": s.width, "height": s.height, "deviceScaleFactor": 1, "mobile": false}
	if err := b.call("Emulation.setDeviceMetricsOverride", size, nil); err != nil {
		return nil, err
	}
	if err := b.call("Page.navigate", map[string]any{"url": s.url}, nil); err != nil {
		return nil, err
	}
	if err := b.await(s.until); err != nil {
		return nil, err
	}
	var picture struct{ Data string }
	if err := b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &picture); err != nil {
		return nil, err
	}
	return base64.StdEncoding.DecodeString(picture.Data)
}

// script resolves when the text is on the page, frames included (the Temporal
// UI shows markdown in one), and nothing but numbers, which are running clocks,
// has changed for a second.
const script = `new Promise(done => {
  const until = %s;
  const text = d => d && d.body ? d.body.innerText + [...d.querySelectorAll("iframe")].map(f => text(f.contentDocument)).join("") : "";
  let before = "", still = 0;
  const timer = setInterval(() => {
    const now = text(document), words = now.replace(/\d+/g, "");
    still = words === before ? still + 1 : 0;
    before = words;
    if (now.includes(until) && still >= 4) { clearInterval(timer); done(true); }
  }, 250);
})`

// await runs the script; a navigation in between destroys it, so it runs again.
func (b *browser) await(until string) error {
	u, err := json.Marshal(until)
	if err != nil {
		return err
	}
	for {
		var answer struct {
			Result struct{ Value bool }
		}
		err := b.call("Runtime.evaluate", map[string]any{
			"expression": fmt.Sprintf(script, u), "awaitPromise": true, "returnByValue": true,
		}, &answer)
		var refused *refusal
		if err != nil && !errors.As(err, &refused) {
			return err
		}
		if answer.Result.Value {
			return nil
		}
	}
}

// refusal is an answer of the browser that says no.
type refusal struct {
	Message string `json:"message"`
	method  string
}

func (r *refusal) Error() string { return r.method + ": " + r.Message }

// call sends one command and reads until its answer; events are passed over.
func (b *browser) call(method string, params map[string]any, out any) error {
	b.last++
	request := map[string]any{"id": b.last, "method": method, "params": params}
	if b.session != "" {
		request["sessionId"] = b.session
	}
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if _, err := b.out.Write(append(line, 0)); err != nil {
		return fmt.Errorf("%s: the browser is gone: %w", method, err)
	}
	for {
		message, err := b.in.ReadBytes(0)
		if err != nil {
			return fmt.Errorf("%s: the browser is gone: %w", method, err)
		}
		var answer struct {
			ID     int
			Result json.RawMessage
			Error  *refusal
		}
		if err := json.Unmarshal(message[:len(message)-1], &answer); err != nil {
			return fmt.Errorf("%s: %w", method, err)
		}
		switch {
		case answer.ID != b.last:
		case answer.Error != nil:
			answer.Error.method = method
			return answer.Error
		case out != nil:
			return json.Unmarshal(answer.Result, out)
		default:
			return nil
		}
	}
}
