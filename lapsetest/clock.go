package lapsetest

import (
	"sync"
	"time"
)

// Clock is a time that moves only when it is told to. Given to a Broker by
// [WithClock], it decides when timed messages are due and when invisible
// messages show again; the length of a long poll and gRPC deadlines stay on real
// time, since the client measures them. Several Brokers may share one Clock.
type Clock struct {
	mu       sync.Mutex
	now      time.Time           // guarded by mu
	watchers map[*watcher]func() // guarded by mu
}

type watcher struct{ _ byte } // not of size zero: two of them must have two addresses

// NewClock returns a Clock that stands at start.
func NewClock(start time.Time) *Clock {
	return &Clock{now: start, watchers: make(map[*watcher]func())}
}

// Now returns the time at which the Clock stands.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance moves the Clock by d and wakes every Receive that waits on it. A
// negative d is allowed: clocks are stepped backwards in the field too.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	c.mu.Unlock()
	c.notify()
}

// Set moves the Clock to t, forwards or backwards, and wakes every Receive that
// waits on it.
func (c *Clock) Set(t time.Time) {
	c.mu.Lock()
	c.now = t
	c.mu.Unlock()
	c.notify()
}

func (c *Clock) notify() {
	c.mu.Lock()
	fs := make([]func(), 0, len(c.watchers))
	for _, f := range c.watchers {
		fs = append(fs, f)
	}
	c.mu.Unlock()
	// Outside the lock: a watcher takes its Broker's lock, under which Now is called.
	for _, f := range fs {
		f()
	}
}

func (c *Clock) watch(f func()) (stop func()) {
	w := new(watcher)
	c.mu.Lock()
	c.watchers[w] = f
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		delete(c.watchers, w)
		c.mu.Unlock()
	}
}
