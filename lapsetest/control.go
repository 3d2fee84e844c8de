package lapsetest

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// The methods of the protocol that a Broker answers: names for Control, FailNext,
// LoseNext and Calls.
const (
	QueryRoute              = "QueryRoute"
	Telemetry               = "Telemetry"
	Heartbeat               = "Heartbeat"
	SendMessage             = "SendMessage"
	ReceiveMessage          = "ReceiveMessage"
	AckMessage              = "AckMessage"
	ChangeInvisibleDuration = "ChangeInvisibleDuration"
	RecallMessage           = "RecallMessage"
	NotifyClientTermination = "NotifyClientTermination"
)

var methods = []string{
	QueryRoute, Telemetry, Heartbeat, SendMessage, ReceiveMessage, AckMessage,
	ChangeInvisibleDuration, RecallMessage, NotifyClientTermination,
}

// ControlFunc sees a request before the server does. If handled is false the
// server goes on as usual, whatever else is returned: the function has only
// observed, counted, or delayed. Otherwise the client gets err if it is not nil (a
// gRPC status, or any error, which becomes Unknown), else resp:
//
//   - a response message of the method;
//   - or a *v2.Status or v2.Code, from which the response is made;
//   - for ReceiveMessage also a []*v2.ReceiveMessageResponse, the frames to send;
//   - for Telemetry, where it is called for each command, nil means silence.
//
// It may block, and must return when ctx ends. No lock is held while it runs, so that
// it may use the Broker; but Stop, Restart and Close wait for it, so that it can only
// start them in a goroutine.
type ControlFunc func(ctx context.Context, req any) (resp any, err error, handled bool)

type control struct {
	method string
	f      ControlFunc
}

// Control adds f for the requests of a method; "" means of every method. Functions
// are asked in the order in which they were added, until one has handled the
// request. remove takes f away again; requests that are inside f stay there. A
// method that does not exist is a mistake in the test: Control panics.
func (b *Broker) Control(method string, f ControlFunc) (remove func()) {
	if method != "" {
		mustKnow(method)
	}
	c := &control{method: method, f: f}
	b.mu.Lock()
	b.controls = append(b.controls, c)
	b.mu.Unlock()
	return func() {
		b.mu.Lock()
		// A copy: ask walks the old slice without the lock.
		b.controls = slices.DeleteFunc(slices.Clone(b.controls), func(o *control) bool { return o == c })
		b.mu.Unlock()
	}
}

func mustKnow(method string) {
	if !slices.Contains(methods, method) {
		panic(fmt.Sprintf("lapsetest: no method %q; there are %v", method, methods))
	}
}

// ask calls the control functions of a method.
func (b *Broker) ask(ctx context.Context, method string, req any) (any, error, bool) {
	b.mu.Lock()
	controls := b.controls
	b.mu.Unlock()
	for _, c := range controls {
		if c.method != "" && c.method != method {
			continue
		}
		resp, err, handled := c.f(ctx, req)
		if !handled {
			continue
		}
		switch r := resp.(type) {
		case *v2.Status:
			resp = answerOf(method, r)
		case v2.Code:
			resp = answerOf(method, result(r, ""))
		}
		return resp, err, true
	}
	return nil, nil, false
}

// FailNext refuses the next n requests of a method with a code, and does nothing of
// what they ask. remove ends it early.
func (b *Broker) FailNext(method string, n int, code v2.Code) (remove func()) {
	mustKnow(method)
	var left atomic.Int64
	left.Store(int64(n))
	remove = b.Control(method, func(context.Context, any) (any, error, bool) {
		if left.Add(-1) < 0 {
			return nil, nil, false
		}
		return code, nil, true
	})
	return remove
}

// LoseNext does what the next n requests of a method ask, and loses the answers:
// the client gets DeadlineExceeded at once instead of after its timeout (for
// Telemetry: silence). A SendMessage is stored then, a ReceiveMessage has hidden
// its messages, an AckMessage counts.
func (b *Broker) LoseNext(method string, n int) {
	mustKnow(method)
	b.mu.Lock()
	b.losses[method] += n
	b.mu.Unlock()
}

// lose reports whether the answer that is about to be given shall be lost.
func (b *Broker) lose(method string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.losses[method] == 0 {
		return false
	}
	b.losses[method]--
	return true
}
