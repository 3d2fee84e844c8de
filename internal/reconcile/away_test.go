package reconcile_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/reconcile"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/orders"
)

// cable lies between a pool and the primary, and can be cut.
type cable struct {
	listener net.Listener
	to       string
	going    sync.WaitGroup

	mu    sync.Mutex
	cut   bool                  // guarded by mu, as the following
	conns map[net.Conn]struct{} // of both sides
}

// overCable has the bundle's store reach the primary over a cable.
func (b *bundle) overCable() *cable {
	b.t.Helper()
	dsn, err := mysql.ParseDSN(stacktest.Require(b.t, "LAPSE_MYSQL_DSN_RECONCILE"))
	if err != nil {
		b.t.Fatal("LAPSE_MYSQL_DSN_RECONCILE cannot be read")
	}
	c := &cable{to: dsn.Addr, conns: map[net.Conn]struct{}{}}
	if c.listener, err = new(net.ListenConfig).Listen(b.ctx, "tcp", "127.0.0.1:0"); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { // after the pool's, which comes later
		_ = c.listener.Close()
		c.set(true)
		c.going.Wait()
	})
	c.going.Go(c.accept)
	dsn.Addr = c.listener.Addr().String()
	b.store = b.openStore(dsn.FormatDSN())
	return c
}

func (c *cable) accept() {
	for {
		client, err := c.listener.Accept()
		if err != nil {
			return // closed at the end of the test
		}
		server, err := net.Dial("tcp", c.to) //nolint:noctx // the test's end closes it
		if err != nil {
			_ = client.Close()
			continue
		}
		c.mu.Lock()
		c.conns[client], c.conns[server] = struct{}{}, struct{}{}
		if c.cut {
			_, _ = client.Close(), server.Close()
		}
		c.mu.Unlock()
		for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
			c.going.Go(func() { // ends with either side
				_, _ = io.Copy(way[0], way[1])
				_, _ = way[0].Close(), way[1].Close()
			})
		}
	}
}

// set cuts the cable, or mends it.
func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	for conn := range c.conns {
		if cut {
			_ = conn.Close()
		}
	}
}

func TestARunThatWaitsForThePrimaryEndsWhenItIsTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	direct := *b
	c := b.overCable()
	ids := b.overdue(1, 60)
	ctx, stop := context.WithCancel(b.ctx)
	defer stop()
	waiting := make(chan struct{})
	var once sync.Once
	asked := 0
	r := b.reconcilerOf(cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		if asked++; asked == 2 { // the first batch is done
			c.set(true)
		}
		outcomes, err := b.store.CancelDue(ctx, ids)
		if err != nil {
			once.Do(func() { close(waiting) })
		}
		return outcomes, err
	}), func(c *reconcile.Config) { c.Lease, c.Batch, c.Page, c.Workers = time.Hour, 10, 30, 1 })
	ended := make(chan error, 1)
	go func() {
		_, err := r.Run(ctx, reconcile.Options{})
		ended <- err
	}()
	<-waiting
	stop()
	told := time.Now()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the run ends with %v, want context.Canceled", err)
	}
	if took := time.Since(told); took > 20*time.Second {
		t.Errorf("it ended %s after it was told, want less than the grace of a shutdown", took)
	}
	if got := b.db.Text(t, "SELECT CONCAT(state, ' ', COALESCE(cursor_order_id, 0)) FROM reconcile_runs"); got != "running 0" {
		t.Errorf("the run's row is %q, want it to be resumed, at its first page", got)
	}
	b.db.Exec(t, "UPDATE reconcile_runs SET lease_until = UTC_TIMESTAMP(3)")
	if report := direct.run(direct.reconciler(), reconcile.Options{}); !report.Resumed || report.Cancelled != 50 {
		t.Errorf("the next run: %+v, want it to resume with the other 50", report)
	}
	b.wantOnce(ids)
}

// A failover takes seconds, and the night goes on after it. The first cut comes before the dispatcher's look at the lock waits, the second before the place
// is kept.
func TestARunOutlastsAFailoverOfThePrimary(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.overCable()
	ids := b.overdue(1, 60)
	asked := 0
	var mend *time.Timer
	cut := func() {
		c.set(true)
		mend = time.AfterFunc(1500*time.Millisecond, func() { c.set(false) })
	}
	r := b.reconcilerOf(cancelFunc(func(ctx context.Context, ids []string) ([]orders.Outcome, error) {
		outcomes, err := b.store.CancelDue(ctx, ids)
		if err == nil {
			if asked++; asked == 1 || asked == 3 {
				cut() // after the commit, so that it is not the worker who waits
			}
		}
		return outcomes, err
	}), func(c *reconcile.Config) { c.Batch, c.Page, c.Workers, c.Rate = 10, 30, 1, 15 })
	report := b.run(r, reconcile.Options{})
	mend.Stop()
	if report.Cancelled != 60 || report.Scanned != 60 {
		t.Errorf("report %+v, want 60 cancelled in one run", report.Counts)
	}
	b.wantOnce(ids)
}
