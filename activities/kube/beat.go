package kube

import (
	"sync"
	"time"
)

// Beat calls a heartbeat at a steady pace, whatever the waiter is doing: a
// request to a server that is away must not look like a dead worker.
type Beat struct {
	mu    sync.Mutex
	found string
	quit  chan struct{}
	ended chan struct{}
}

// StartBeat calls say about every so often (0: one second), from another
// goroutine, with what was Set last, until Stop. A nil say is never called.
func StartBeat(every time.Duration, say func(found string)) *Beat {
	b := &Beat{quit: make(chan struct{}), ended: make(chan struct{})}
	if say == nil {
		close(b.ended)
		return b
	}
	if every <= 0 {
		every = time.Second
	}
	go func() {
		defer close(b.ended)
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			say(b.Last())
			select {
			case <-b.quit:
				return
			case <-ticker.C:
			}
		}
	}()
	return b
}

// Set says what was found.
func (b *Beat) Set(found string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.found = found
}

// Last is what was found last.
func (b *Beat) Last() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.found
}

// Stop ends the heartbeat and waits for the last call.
func (b *Beat) Stop() {
	close(b.quit)
	<-b.ended
}
