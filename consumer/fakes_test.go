// Fakes of what a consumer talks to, for its rules. What depends on a real server's behaviour is tested over the wire, in wire_test.go
// and real_test.go.

package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// patience is how long a test waits for what has to happen. It is long, for a busy machine; nothing waits for it to pass.
const patience = 20 * time.Second

// until waits for a condition.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for !cond() {
		select {
		case <-ticker.C:
		case <-limit.C:
			t.Fatalf("waited %s in vain until %s", patience, what)
		}
	}
}

// during checks that a condition holds all the time.
func during(t testing.TB, d time.Duration, what string, cond func() bool) {
	t.Helper()
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	limit := time.NewTimer(d)
	defer limit.Stop()
	for {
		if !cond() {
			t.Fatalf("within %s it did not hold that %s", d, what)
		}
		select {
		case <-ticker.C:
		case <-limit.C:
			return
		}
	}
}

// fakeSource hands out messages as a broker does: hidden while in hand, visible again when their time is over, with a handle that each
// ChangeInvisible replaces.
type fakeSource struct {
	mu       sync.Mutex
	all      []*fakeMessage
	views    map[*Delivery]fakeView
	receives int
	empty    time.Duration // how long a Receive waits for a message
	ackErr   error
	hideErr  error
	notReady error
}

type fakeMessage struct {
	id         string
	body       []byte
	keys       []string
	deliverAt  time.Time
	bornAt     time.Time
	attempt    int
	visible    time.Time
	generation int
	acked      int
	hides      []time.Duration
}

type fakeView struct {
	m          *fakeMessage
	generation *int
}

func newFakeSource() *fakeSource {
	return &fakeSource{views: map[*Delivery]fakeView{}, empty: 20 * time.Millisecond}
}

func (s *fakeSource) send(body []byte) *fakeMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := &fakeMessage{id: "M" + strconv.Itoa(len(s.all)+1), body: body}
	s.all = append(s.all, m)
	return m
}

// expire sends a message of orders.
func (s *fakeSource) expire(t testing.TB, ids ...string) *fakeMessage {
	t.Helper()
	return s.send(expiry(t, ids...))
}

func expiry(t testing.TB, ids ...string) []byte {
	t.Helper()
	body, err := orders.EncodeExpiry(orders.Expiry{Due: time.Now().Truncate(time.Millisecond), Orders: ids})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// numbers gives n ids from the first on.
func numbers(first, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = strconv.Itoa(first + i)
	}
	return ids
}

func (s *fakeSource) Receive(ctx context.Context, limit int, invisible time.Duration) ([]*Delivery, error) {
	s.mu.Lock()
	s.receives++
	s.mu.Unlock()
	end := time.Now().Add(s.empty)
	for {
		s.mu.Lock()
		var out []*Delivery
		now := time.Now()
		for _, m := range s.all {
			if len(out) < limit && m.acked == 0 && m.visible.Before(now) {
				m.attempt++
				m.generation++
				m.visible = now.Add(invisible)
				d := &Delivery{MessageID: m.id, Topic: "fake", Body: m.body, Keys: m.keys, Attempt: m.attempt, DeliverAt: m.deliverAt, BornAt: m.bornAt}
				s.views[d] = fakeView{m, new(int)}
				*s.views[d].generation = m.generation
				out = append(out, d)
			}
		}
		s.mu.Unlock()
		if len(out) > 0 {
			return out, nil
		}
		if time.Now().After(end) {
			return nil, nil
		}
		if !sleep(ctx, time.Millisecond) {
			return nil, ctx.Err()
		}
	}
}

func (s *fakeSource) Ack(_ context.Context, d *Delivery) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ackErr != nil {
		return s.ackErr
	}
	v := s.views[d]
	if time.Now().After(v.m.visible) {
		return rmq.ErrHandleExpired
	}
	if *v.generation == v.m.generation { // a replaced handle answers OK and does nothing
		v.m.acked++
	}
	return nil
}

func (s *fakeSource) ChangeInvisible(_ context.Context, d *Delivery, invisible time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.views[d]
	v.m.hides = append(v.m.hides, invisible)
	if s.hideErr != nil {
		return s.hideErr
	}
	if v.m.acked > 0 || *v.generation != v.m.generation || time.Now().After(v.m.visible) {
		return rmq.ErrHandleExpired
	}
	v.m.generation++
	*v.generation = v.m.generation
	v.m.visible = time.Now().Add(invisible)
	return nil
}

func (s *fakeSource) Ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notReady
}

// look reads a message's state.
func look[T any](s *fakeSource, f func() T) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return f()
}

func (s *fakeSource) acked(ms ...*fakeMessage) bool {
	return look(s, func() bool {
		return !slices.ContainsFunc(ms, func(m *fakeMessage) bool { return m.acked == 0 })
	})
}

func (s *fakeSource) maxAttempt() int {
	return look(s, func() int {
		n := 0
		for _, m := range s.all {
			n = max(n, m.attempt)
		}
		return n
	})
}

// fakeStore cancels and parks by what a test has told it. on is asked first; a nil error and no outcomes mean: as usual.
type fakeStore struct {
	mu        sync.Mutex
	on        func(ctx context.Context, ids []string) ([]orders.Outcome, error)
	ready     error
	parkErr   error
	calls     [][]string
	times     []time.Time
	cancelled map[string]int
	parked    []orders.Parked
	readies   int
}

func newFakeStore() *fakeStore { return &fakeStore{cancelled: map[string]int{}} }

func (s *fakeStore) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *fakeStore) CancelDue(ctx context.Context, ids []string) ([]orders.Outcome, error) {
	s.mu.Lock()
	s.calls = append(s.calls, slices.Clone(ids))
	s.times = append(s.times, time.Now())
	on := s.on
	s.mu.Unlock()
	if on != nil {
		if outcomes, err := on(ctx, ids); err != nil || outcomes != nil {
			return outcomes, err
		}
	}
	return s.usual(ids), nil
}

func (s *fakeStore) usual(ids []string) []orders.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]orders.Outcome, len(ids))
	for i, id := range ids {
		out[i] = orders.Outcome{ID: id, Result: orders.ResultCancelled}
		if s.cancelled[id] > 0 {
			out[i].Result = orders.ResultAlreadyCancelled
		}
		s.cancelled[id]++
	}
	return out
}

func (s *fakeStore) Park(_ context.Context, p orders.Parked) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.parkErr != nil {
		return s.parkErr
	}
	s.parked = append(s.parked, p)
	return nil
}

func (s *fakeStore) Ready(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readies++
	return s.ready
}

func (s *fakeStore) allCancelled(ids ...string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(ids, func(id string) bool { return s.cancelled[id] == 0 })
}

func (s *fakeStore) asked() [][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

func (s *fakeStore) parks() []orders.Parked {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.parked)
}

// errOwn is an error of an order's own: nothing that IsUnavailable knows.
var errOwn = errors.New("this order cannot be cancelled")

// failing makes every call fail that has one of the ids in it.
func failing(err error, bad ...string) func(context.Context, []string) ([]orders.Outcome, error) {
	return func(_ context.Context, ids []string) ([]orders.Outcome, error) {
		for _, id := range ids {
			if slices.Contains(bad, id) {
				return nil, fmt.Errorf("order %s: %w", id, err)
			}
		}
		return nil, nil
	}
}

// bundle is a running consumer and what it talks to.
type bundle struct {
	*Consumer
	source *fakeSource
	store  *fakeStore
	reg    *prometheus.Registry
	stop   context.CancelFunc
	done   chan error
}

// setup makes a consumer with short times that is not yet run. Invisible is set past the validation: the fakes have no minimum.
func setup(t testing.TB, cfg Config, source *fakeSource, store *fakeStore) *bundle {
	t.Helper()
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&cfg.BackoffMin, 5*time.Millisecond)
	def(&cfg.BackoffMax, 20*time.Millisecond)
	def(&cfg.ShutdownGrace, patience)
	invisible := cfg.Invisible
	cfg.Invisible = 0
	reg := prometheus.NewPedanticRegistry()
	cfg.Registerer = reg
	c, err := New(store, store, source, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if invisible != 0 {
		c.cfg.Invisible = invisible
	}
	return &bundle{Consumer: c, source: source, store: store, reg: reg, done: make(chan error, 1)}
}

// run runs the consumer until the test ends or stop is called.
func (b *bundle) run(t testing.TB) *bundle {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	b.stop = cancel
	go func() { b.done <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		b.ended(t)
	})
	return b
}

// ended waits until Run has returned.
func (b *bundle) ended(t testing.TB) {
	t.Helper()
	select {
	case err := <-b.done:
		if err != nil {
			t.Errorf("run: %v", err)
		}
		b.done <- nil // for the next who asks
	case <-time.After(2 * patience):
		t.Error("Run did not return")
	}
}

func start(t testing.TB, cfg Config) *bundle {
	t.Helper()
	return setup(t, cfg, newFakeSource(), newFakeStore()).run(t)
}

// metric reads the value of a counter or gauge, or the sum of a histogram, for one value of its label ("" if it has none).
func metric(t testing.TB, reg prometheus.Gatherer, name, label string) float64 {
	t.Helper()
	m := find(t, reg, name, label)
	switch {
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue()
	case m.GetGauge() != nil:
		return m.GetGauge().GetValue()
	}
	return m.GetHistogram().GetSampleSum()
}

func find(t testing.TB, reg prometheus.Gatherer, name, label string) *dto.Metric {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if label == "" || len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label {
				return m
			}
		}
	}
	t.Fatalf("there is no metric %s{%s}", name, label)
	return nil
}
