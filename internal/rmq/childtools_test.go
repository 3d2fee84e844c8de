package rmq

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Tools of the tests that run in a process of their own, without a testing.T.

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func childLog(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(&lockedWriter{w: w}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func poll100(ctx context.Context, cond func() bool) bool {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(10 * time.Second)
	defer end.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-end.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

func awaitBoth(ctx context.Context, p *Producer, c *Consumer) error {
	if !poll100(ctx, func() bool { return p.Ready() == nil && c.Ready() == nil }) {
		return errors.Join(errors.New("not ready"), p.Ready(), c.Ready())
	}
	return nil
}

func openBoth(cfg Config, group, topic string) (*Producer, *Consumer, error) {
	p, err := NewProducer(cfg, topic)
	if err != nil {
		return nil, nil, err
	}
	c, err := NewConsumer(cfg, group, topic)
	if err != nil {
		return nil, nil, err
	}
	return p, c, awaitBoth(context.Background(), p, c)
}

func closeBoth(ctx context.Context, p *Producer, c *Consumer) error {
	return errors.Join(p.Close(ctx), c.Close(ctx))
}

// countFiles returns what the open files of this process are, sorted, without the
// directory that is read for it.
func countFiles() []string {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // not Linux
	}
	var out []string
	for _, e := range entries {
		if to, err := os.Readlink(dir + "/" + e.Name()); err == nil {
			out = append(out, to)
		}
	}
	sort.Strings(out)
	return out
}

// count reads one counter; labels are names and values in turn.
func count(reg prometheus.Gatherer, name string, labels ...string) (float64, error) {
	families, err := reg.Gather()
	if err != nil {
		return 0, err
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var have []string
			for _, l := range m.GetLabel() {
				have = append(have, l.GetName()+"="+l.GetValue())
			}
			all := true
			for l := range slices.Chunk(labels, 2) {
				all = all && slices.Contains(have, strings.Join(l, "="))
			}
			if all {
				return m.GetCounter().GetValue(), nil
			}
		}
	}
	return 0, nil
}
