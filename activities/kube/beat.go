package kube

import (
	"sync"
	"time"
)

// beat calls a heartbeat at a steady pace, whatever the waiter is doing: a
// list against a server that is away must not look like a dead worker.
type beat struct {
	mu    sync.Mutex
	found string
	quit  chan struct{}
	ended chan struct{}
}

func newBeat(w Wait) *beat {
	b := &beat{quit: make(chan struct{}), ended: make(chan struct{})}
	if w.Heartbeat == nil {
		close(b.ended)
		return b
	}
	every := w.Every
	if every <= 0 {
		every = time.Second
	}
	go func() {
		defer close(b.ended)
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			w.Heartbeat(b.last())
			select {
			case <-b.quit:
				return
			case <-ticker.C:
			}
		}
	}()
	return b
}

func (b *beat) set(found string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.found = found
}

func (b *beat) last() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.found
}

func (b *beat) stop() {
	close(b.quit)
	<-b.ended
}
