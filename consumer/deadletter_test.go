package consumer

import (
	"bytes"
	"context"
	"database/sql/driver"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// logText is a log that a test reads while it is written.
type logText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// errorsWith counts the lines at level ERROR that contain all the texts.
func (l *logText) errorsWith(texts ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(line, "level=ERROR") && !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(line, s) }) {
			n++
		}
	}
	return n
}

func watch(t testing.TB, source Source, parker Parker, cfg DeadLetterConfig) (*logText, *prometheus.Registry) {
	t.Helper()
	log, reg := &logText{}, prometheus.NewPedanticRegistry()
	cfg.Logger, cfg.Registerer = slog.New(slog.NewTextHandler(log, nil)), reg
	w, err := NewDeadLetters(source, parker, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return log, reg
}

func TestADeadLetterIsCountedLoggedAndParked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	m := source.expire(t, "41", "42")
	log, reg := watch(t, source, store, DeadLetterConfig{})
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	parks := store.parks()
	if len(parks) != 1 || parks[0].What != orders.ParkedMessage || parks[0].Ref != m.id || !bytes.Equal(parks[0].Body, m.body) {
		t.Errorf("parked %+v, want the message with its body", parks)
	}
	if n := metric(t, reg, "lapse_dead_letters_total", ""); n != 1 {
		t.Errorf("%v dead letters counted, want 1", n)
	}
	if log.errorsWith("41,42", m.id) != 1 {
		t.Error("there is no error in the log that names the orders")
	}
	if len(store.asked()) != 0 {
		t.Error("the orders were touched")
	}
}

func TestADeadLetterThatCannotBeReadIsLoggedWithItsKeys(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{"unreadable": "?", "newer": `{"v":9}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			source, store := newFakeSource(), newFakeStore()
			m := source.send([]byte(body))
			source.mu.Lock()
			m.keys = []string{"17", "18"}
			source.mu.Unlock()
			log, _ := watch(t, source, store, DeadLetterConfig{})
			until(t, "it is acknowledged", func() bool { return source.acked(m) })
			if len(store.parks()) != 1 || log.errorsWith("17,18") != 1 {
				t.Errorf("parked %v, log %s; want the message and its keys", store.parks(), log.b.String())
			}
		})
	}
}

func TestADeadLetterStaysWithTheBrokerUntilItIsParked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	store.parkErr = driver.ErrBadConn
	m := source.expire(t, "1")
	log, _ := watch(t, source, store, DeadLetterConfig{Retry: time.Millisecond})
	until(t, "it could not be parked", func() bool { return log.errorsWith("cannot be parked", m.id) == 1 })
	if source.acked(m) {
		t.Fatal("it is acknowledged")
	}
	store.set(func() { store.parkErr = nil })
	source.mu.Lock()
	m.visible = time.Time{} // its time is over
	source.mu.Unlock()
	until(t, "it is acknowledged", func() bool { return source.acked(m) })
	if len(store.parks()) != 1 {
		t.Errorf("parked %v", store.parks())
	}
}

// flakySource fails some times before it works.
type flakySource struct {
	*fakeSource
	mu   sync.Mutex
	errs []error
}

func (s *flakySource) Receive(ctx context.Context, limit int, invisible time.Duration) ([]*Delivery, error) {
	s.mu.Lock()
	if len(s.errs) > 0 {
		err := s.errs[0]
		s.errs = s.errs[1:]
		s.mu.Unlock()
		return nil, err
	}
	s.mu.Unlock()
	return s.fakeSource.Receive(ctx, limit, invisible)
}

func TestTheWatcherWaitsForItsTopic(t *testing.T) {
	t.Parallel()
	source := &flakySource{fakeSource: newFakeSource(), errs: []error{fmt.Errorf("no topic: %w", rmq.ErrNotReady), io.ErrUnexpectedEOF, rmq.ErrNotReady}}
	m := source.expire(t, "1")
	log, _ := watch(t, source, newFakeStore(), DeadLetterConfig{Retry: time.Millisecond})
	until(t, "the dead letter is acknowledged", func() bool { return source.acked(m) })
	log.mu.Lock()
	defer log.mu.Unlock()
	if n := strings.Count(log.b.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings, want 1: a topic that is not there is no fault\n%s", n, log.b.String())
	}
}

func TestTheWatchersConfigurationIsChecked(t *testing.T) {
	t.Parallel()
	source, store := newFakeSource(), newFakeStore()
	for name, cfg := range map[string]DeadLetterConfig{"Retry": {Retry: -1}, "Timeout": {Timeout: -1}, "Invisible": {Invisible: time.Second}} {
		if _, err := NewDeadLetters(source, store, cfg); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want an error that names it", name, err)
		}
	}
	if _, err := NewDeadLetters(nil, store, DeadLetterConfig{}); err == nil {
		t.Error("no source, and no error")
	}
}
