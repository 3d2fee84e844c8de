package trial

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"testing"
	"time"
)

func TestSettingsThatNoBenchCanWorkWithAreRefused(t *testing.T) {
	t.Parallel()
	good := BenchConfig{Orders: 100, Repeat: 1, Rate: 1, Duration: time.Minute, BrokerAdmin: "127.0.0.1:1", OneByOneWorkers: []int{1, 64}}
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*BenchConfig){
		"few orders":      func(c *BenchConfig) { c.Orders = 99 },
		"no repetition":   func(c *BenchConfig) { c.Repeat = 0 },
		"rate":            func(c *BenchConfig) { c.Rate = math.NaN() },
		"duration":        func(c *BenchConfig) { c.Duration = 0 },
		"no broker":       func(c *BenchConfig) { c.BrokerAdmin = "" },
		"no worker":       func(c *BenchConfig) { c.LimitWorkers = []int{1, 0} },
		"too many for us": func(c *BenchConfig) { c.OneByOneWorkers = []int{65} },
	} {
		c := good
		spoil(&c)
		if err := c.validate(); !errors.Is(err, ErrUsage) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOrdersOfABenchHaveTwoItemsAndAreTheSameEachTime(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for i := range 5000 {
		o, again := benchOrder(i), benchOrder(i)
		if len(o.Items) != 2 || o.Items[0].SKU == o.Items[1].SKU || o.ID == again.ID {
			t.Fatalf("order %d: %+v", i, o)
		}
		var sum int64
		for n, it := range o.Items {
			if it != again.Items[n] {
				t.Fatalf("order %d differs from time to time: %+v, %+v", i, o, again)
			}
			sum += it.Quantity * it.Price
			seen[it.SKU] = true
		}
		if sum != o.Amount {
			t.Fatalf("order %d: amount %d, items %d", i, o.Amount, sum)
		}
	}
	if len(seen) != benchSKUs {
		t.Errorf("%d articles are asked for, want %d", len(seen), benchSKUs)
	}
}

func TestTheTickOfADeadlineIsTheNextOneOrItself(t *testing.T) {
	t.Parallel()
	const tick = 100 * time.Millisecond
	on := time.UnixMilli(1_764_514_800_100)
	for _, tc := range []struct{ deadline, want time.Time }{
		{on, on}, {on.Add(time.Millisecond), on.Add(tick)}, {on.Add(-time.Millisecond), on}, {on.Add(99 * time.Millisecond), on.Add(tick)},
	} {
		if got := tickAfter(tc.deadline, tick); !got.Equal(tc.want) {
			t.Errorf("tick after %s is %s, want %s", tc.deadline, got, tc.want)
		}
	}
}

func TestWorkInParallelIsDoneOnceEachAndStopsAtAnError(t *testing.T) {
	t.Parallel()
	var done [1000]atomic.Int32
	if err := inParallel(t.Context(), len(done), 7, func(_ context.Context, i int) error { done[i].Add(1); return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range done {
		if n := done[i].Load(); n != 1 {
			t.Fatalf("%d was done %d times", i, n)
		}
	}
	wrong := errors.New("wrong")
	var begun atomic.Int32
	err := inParallel(t.Context(), 1_000_000, 2, func(_ context.Context, i int) error {
		begun.Add(1)
		if i == 10 {
			return wrong
		}
		return nil
	})
	if !errors.Is(err, wrong) || begun.Load() > 1000 {
		t.Errorf("%v after %d", err, begun.Load())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := inParallel(ctx, 5, 2, func(context.Context, int) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

func TestTheBestNumberOfWorkersIsTheFastest(t *testing.T) {
	t.Parallel()
	rates := map[int]float64{1: 200, 4: 900, 16: 850}
	if best, err := bestOf([]int{1, 4, 16}, func(n int) (float64, error) { return rates[n], nil }); best != 4 || err != nil {
		t.Errorf("%d, %v", best, err)
	}
	if best, err := bestOf([]int{16}, func(int) (float64, error) { return 0, errors.New("tried") }); best != 16 || err != nil {
		t.Errorf("one alone was tried: %d, %v", best, err)
	}
	if _, err := bestOf([]int{1, 4}, func(int) (float64, error) { return 0, errors.New("no broker") }); err == nil {
		t.Error("an error is lost")
	}
}
