package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/consumer"
	"github.com/lapse-orders/lapse/internal/payments/paytest"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

// gatewayOf is the configuration of a payment service.
func gatewayOf(s *paytest.Service) []string {
	return []string{"LAPSE_GATEWAY_URL=" + s.URL, "LAPSE_GATEWAY_NAME=bank", "LAPSE_GATEWAY_SECRET=" + paytest.Secret}
}

// account gives a DSN for the bundle's database with the account that the stack has for a role: what deploy/mysql/users.sql grants must do.
func (b *bundle) account(t *testing.T, variable string) string {
	t.Helper()
	dsn, err := mysql.ParseDSN(stacktest.Require(t, variable))
	if err != nil {
		t.Fatalf("%s cannot be read", variable)
	}
	dsn.DBName = b.db.Name
	return variable + "=" + dsn.FormatDSN()
}

func (b *bundle) placeDue(t *testing.T) int64 {
	t.Helper()
	return b.place(t, orders.NewOrder{Amount: 100, DeadlineAt: time.Now().Add(-time.Second), Items: []orders.Item{{SKU: "pen", Quantity: 1, Price: 100}}}).ID
}

// owe makes a cancelled order whose money came too late.
func (b *bundle) owe(t *testing.T) int64 {
	t.Helper()
	id := b.placeDue(t)
	if _, err := b.store.CancelDue(t.Context(), []string{orders.FormatID(id)}); err != nil {
		t.Fatal(err)
	}
	result, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: fmt.Sprintf("T-%d", id), OrderID: id, Currency: "EUR", Amount: 100})
	if err != nil || result.Refund != 100 {
		t.Fatalf("late payment: %+v, %v", result, err)
	}
	return id
}

// The whole way with a payment service: messages pass the gate, an order in doubt comes again by a message of its own, late money goes back.
func TestMessagesPassThePaymentGateway(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	service := paytest.Start(t)
	var silent atomic.Bool
	silent.Store(true)
	open, paid, doubt := b.placeDue(t), b.placeDue(t), b.placeDue(t)
	service.Set(open, "unpaid")
	service.Pay(paid, paytest.Payment{TransactionID: "T-1", Currency: "EUR", Amount: 100})
	service.Set(doubt, "unpaid")
	service.Before(paytest.Silent(func(c paytest.Call) bool { return c.OrderID == fmt.Sprint(doubt) && silent.Load() }))
	environ := append(b.environ(gatewayOf(service)...), "LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_GATEWAY_TIMEOUT=200ms", "LAPSE_GATEWAY_DECIDE_WITHIN=1s", "LAPSE_GATEWAY_HOLD_MIN=3s",
		"LAPSE_REFUND_POLL=50ms", b.account(t, "LAPSE_MYSQL_DSN_CONSUME"), b.account(t, "LAPSE_MYSQL_DSN_REFUND"), b.account(t, "LAPSE_MYSQL_DSN_RELAY"))
	all := start(t, environ, "all")
	eventually(t, "each has its answer", func() bool {
		return b.status(t, open) == orders.Cancelled && b.status(t, paid) == orders.Paid && b.db.Int(t, "SELECT COUNT(*) FROM orders WHERE id = ? AND hold_until IS NOT NULL", doubt) == 1
	})
	if got := service.State(open); got != "closed" {
		t.Errorf("the page of the cancelled order is %s", got)
	}
	silent.Store(false)
	eventually(t, "the order in doubt is cancelled by its next message", func() bool { return b.status(t, doubt) == orders.Cancelled })
	if held := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ? AND kind = 'held'", doubt); held == 0 {
		t.Error("its story does not say that it was held")
	}

	late, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "T-2", OrderID: open, Currency: "EUR", Amount: 100})
	if err != nil || late.Refund != 100 {
		t.Fatalf("late payment: %+v, %v", late, err)
	}
	eventually(t, "the late money has gone back", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE state = 'done'") == 1 })
	if list := service.Refunds(); len(list) != 1 || list[0].TransactionID != "T-2" || list[0].Amount != 100 {
		t.Errorf("refunds %+v, want one of T-2", list)
	}
	b.cancelledOnce(t, open, doubt)
	for _, want := range []struct {
		name, labels string
		value        float64
	}{
		{"lapse_gate_payments_total", `outcome="accepted"`, 1},
		{"lapse_refund_worker_results_total", `kind="refund",result="done"`, 1},
		{"lapse_gateway_left_alone", "", 0},
		{"lapse_outcomes_total", `result="already_paid"`, 1},
	} {
		eventually(t, want.name, func() bool {
			got, found := all.metric(t, want.name, want.labels)
			return found && got == want.value
		})
	}
	if got, _ := all.metric(t, "lapse_gate_doubts_total", `result="held"`); got == 0 {
		t.Error("no hold is counted")
	}
	if _, body := all.get(t, "/readyz"); !strings.Contains(body, `"refund"`) || strings.Contains(body, `"gateway"`) {
		t.Errorf("ready: %s; want the refunds in it, and not the gateway", body)
	}
}

// The worker is killed between any two of its steps, for real. Whoever comes next finds the refund pending, and the payment service the key.
func TestRefundWorkerKilledBetweenAnyTwoStepsMakesOneRefund(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"asked, not made", "made, not answered", "answered, not marked", "at random"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
			service := paytest.Start(t)
			ids := []int64{b.owe(t), b.owe(t), b.owe(t)}
			environ := append(b.environ(gatewayOf(service)...), "LAPSE_REFUND_POLL=10ms", "LAPSE_REFUND_BACKOFF_MIN=10ms", b.account(t, "LAPSE_MYSQL_DSN_REFUND"))
			random := rand.New(rand.NewPCG(7, 7))
			rounds := 1
			if step == "at random" {
				rounds = 4
			}
			for range rounds {
				reached := make(chan struct{}, 64)
				stay := func(_ paytest.Call, _ http.ResponseWriter, r *http.Request) bool {
					reached <- struct{}{}
					<-r.Context().Done() // the killed process's connection
					return true
				}
				free := func() {}
				switch step {
				case "asked, not made":
					service.Before(stay)
				case "made, not answered":
					service.After(stay)
				case "answered, not marked":
					free = b.lock(t, "SELECT id FROM orders FOR UPDATE")
				case "at random":
					b.owe(t)
					service.Before(func(paytest.Call, http.ResponseWriter, *http.Request) bool {
						select {
						case reached <- struct{}{}:
						default:
						}
						return false
					})
				}
				worker := spawn(t, environ, "refund")
				switch step {
				case "answered, not marked":
					eventually(t, "its marks wait", func() bool { return b.waiting(t, "%FROM orders FORCE INDEX (PRIMARY)%FOR UPDATE%") >= 1 })
				case "at random":
					await(t, reached, "it asks")
					pause := time.NewTimer(time.Duration(random.Int64N(int64(15 * time.Millisecond))))
					select {
					case <-pause.C:
					case <-t.Context().Done():
					}
				default:
					await(t, reached, "it asks")
				}
				worker.signal(syscall.SIGKILL)
				if code := worker.wait(t); code != -1 {
					t.Fatalf("the worker ends with %d, want a kill", code)
				}
				free()
				service.Before(nil)
				service.After(nil)
				if step != "at random" {
					if n := b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE state = 'pending'"); n != int64(len(ids)) {
						t.Errorf("%d refunds are pending after the kill, want all %d", n, len(ids))
					}
				}
				b.db.Exec(t, "UPDATE refunds SET available_at = UTC_TIMESTAMP(3) WHERE state = 'pending'") // the lease ends
			}
			next := spawn(t, environ, "refund")
			eventually(t, "all are done", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE state <> 'done'") == 0 })
			var refunded []string
			for _, r := range service.Refunds() {
				refunded = append(refunded, r.TransactionID)
				if r.Amount != 100 {
					t.Errorf("%d of %s went back, want 100", r.Amount, r.TransactionID)
				}
			}
			owed := int(b.db.Int(t, "SELECT COUNT(*) FROM refunds"))
			slices.Sort(refunded)
			if len(refunded) != owed || len(slices.Compact(refunded)) != owed {
				t.Errorf("refunds of %v, want one of each of %d payments", refunded, owed)
			}
			if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE kind = 'refunded'"); n != int64(owed) {
				t.Errorf("%d events of refunds, want %d", n, owed)
			}
			next.ready(t)
			next.signal(syscall.SIGTERM)
			if code := next.wait(t); code != exitDone {
				t.Errorf("the next worker ends with %d, want 0", code)
			}
		})
	}
}

// The manual cancel of the command line has the page closed.
func TestTheRefundServiceClosesThePageOfAnOrderCancelledOnTheCommandLine(t *testing.T) {
	t.Parallel()
	b := setup(t)
	service := paytest.Start(t)
	id := b.place(t, orders.NewOrder{Amount: 100, Timeout: time.Hour}).ID
	service.Set(id, "unpaid")
	environ := append(b.environ(gatewayOf(service)...), "LAPSE_REFUND_POLL=10ms", b.account(t, "LAPSE_MYSQL_DSN_REFUND"))
	if code, _, stderr := lapse(t, environ, "cancel", fmt.Sprint(id), "--reason", "changed my mind"); code != exitDone {
		t.Fatalf("cancel: exit code %d, %s", code, stderr)
	}
	start(t, environ, "refund")
	eventually(t, "the page is closed", func() bool { return service.State(id) == "closed" })
	eventually(t, "the task is done", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM gateway_tasks") == 0 })
	if got := b.db.Text(t, "SELECT CAST(detail AS CHAR) FROM order_events WHERE order_id = ? AND kind = 'gateway'", id); !strings.Contains(got, `"closed"`) {
		t.Errorf("its story says %s", got)
	}
}

// A gateway that is down makes lapse refund unready, and says which call fails.
func TestReadinessOfTheRefundServiceNamesAGatewayThatIsDown(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	b.owe(t)
	service := paytest.Start(t)
	service.Before(paytest.Status(500, paytest.All))
	p := start(t, append(b.environ(gatewayOf(service)...), "LAPSE_REFUND_POLL=10ms", "LAPSE_REFUND_BACKOFF_MIN=10ms", "LAPSE_REFUND_BACKOFF_MAX=20ms",
		"LAPSE_GATEWAY_BREAKER_FAILURES=2", "LAPSE_GATEWAY_BREAKER_PAUSE=3s"), "refund")
	eventually(t, "it names the gateway", func() bool {
		status, body := p.get(t, "/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "the last calls of refund have failed")
	})
	service.Before(nil)
	eventually(t, "the refund is done", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE state = 'done'") == 1 })
	p.ready(t)
	if code, stdout, stderr := lapse(t, []string{"LAPSE_HTTP_ADDR=" + p.addr(t)}, "health", "refund"); code != exitDone || stdout != "database: ok\ngateway: ok\nrefund: ok\n" {
		t.Errorf("health: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
}

func TestRefundWithoutAGatewaySaysWhatToSet(t *testing.T) {
	t.Parallel()
	for want, environ := range map[string][]string{
		"there is no payment gateway to refund through: set gateway.url":                      {},
		"gateway.url is given (from environment LAPSE_GATEWAY_URL) and gateway.name is not":   {"LAPSE_GATEWAY_URL=http://127.0.0.1:1/pay", "LAPSE_GATEWAY_SECRET=" + paytest.Secret},
		"gateway.url is given (from environment LAPSE_GATEWAY_URL) and gateway.secret is not": {"LAPSE_GATEWAY_URL=http://127.0.0.1:1/pay", "LAPSE_GATEWAY_NAME=bank"},
		`gateway.url: "127.0.0.1:1" (from environment LAPSE_GATEWAY_URL) is not http`:         {"LAPSE_GATEWAY_URL=127.0.0.1:1"},
		`gateway.secret: (from environment LAPSE_GATEWAY_SECRET) has less than 16 characters`: {"LAPSE_GATEWAY_SECRET=short"},
	} {
		ctx, stop := context.WithTimeout(t.Context(), limit)
		var out, errOut output
		code := run(ctx, []string{"refund"}, append(environ, "LAPSE_MYSQL_DSN=u:p@tcp(127.0.0.1:1)/d", "LAPSE_HTTP_ADDR=127.0.0.1:0"), &out, &errOut)
		stop()
		if code != exitUsage || !strings.Contains(errOut.String(), want) {
			t.Errorf("%v: exit code %d, %s; want 2 and %q", environ, code, errOut.String(), want)
		}
	}
}

// The database is away for longer than all attempts at a message take, and every consumer that has it dies. The broker gives it up; the orders
// are cancelled all the same, by the scan, and the message is counted and kept.
//
// case MQ-4
func TestOrdersOfAMessageThatTheBrokerGaveUpAreCancelledByReconcile(t *testing.T) {
	t.Parallel()
	b, scanning := reconciling(t)
	b.broker = lapsetest.Start(t, lapsetest.WithPollLimit(time.Second))
	b.broker.CreateTopic(testTopic, lapsetest.Delay, 8)
	const attempts = 2
	b.broker.CreateGroup(testGroup, attempts-1)
	b.broker.CreateGroup(consumer.DeadLetterGroup(testGroup), 16)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	ids := []int64{b.placeDue(t), b.placeDue(t), b.placeDue(t)}
	environ := b.environ("LAPSE_CONSUMER_INVISIBLE=10s", "LAPSE_CONSUMER_CANCEL_TIMEOUT=5s")
	b.db.Exec(t, "UPDATE orders SET deadline_at = deadline_at - INTERVAL 1 HOUR") // overdue for long by the time of the scan
	b.message(t, ids...)
	down := b.lock(t, "SELECT id FROM orders FOR UPDATE")
	for n := range attempts {
		p := spawn(t, environ, "consume")
		eventually(t, "it has the orders in hand, and the database gives no answer", func() bool { return b.waiting(t, "%FROM orders FORCE INDEX (PRIMARY)%FOR UPDATE%") >= 1 })
		p.signal(syscall.SIGKILL)
		if code := p.wait(t); code != -1 {
			t.Fatalf("the consumer ends with %d, want a kill", code)
		}
		eventually(t, "the killed one's statement is gone", func() bool { return b.waiting(t, "%FROM orders FORCE INDEX (PRIMARY)%FOR UPDATE%") == 0 })
		b.broker.SetSkew(time.Duration(n+1) * 11 * time.Second) // its invisible time is over
	}
	down()
	p := start(t, environ, "consume")
	eventually(t, "the message is counted", func() bool {
		n, found := p.metric(t, "lapse_dead_letters_total", "")
		return found && n == 1
	})
	for _, id := range ids {
		if got := b.status(t, id); got != orders.Unpaid {
			t.Errorf("order %d is %s by a message that was given up, want unpaid", id, got)
		}
	}
	eventually(t, "the message is parked", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = 'message'") == 1 })
	if code, stdout, stderr := lapse(t, scanning, "reconcile", "--once"); code != exitDone || !strings.Contains(stdout, "  cancelled         3 ") {
		t.Errorf("reconcile: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	b.cancelledOnce(t, ids...)
}

// Reconcile passes the same gate as the messages.
func TestReconcilePassesThePaymentGateway(t *testing.T) {
	t.Parallel()
	b, environ := reconciling(t)
	ids := b.overdue(t, 4)
	service := paytest.Start(t)
	service.Pay(ids[0], paytest.Payment{TransactionID: "T-1", Currency: "EUR", Amount: 100})
	service.Set(ids[1], "in_progress")
	service.Set(ids[2], "refunded")
	service.Set(ids[3], "unpaid")
	code, stdout, stderr := lapse(t, append(environ, gatewayOf(service)...), "reconcile", "--once")
	if code != exitDone {
		t.Fatalf("exit code %d, %s", code, stderr)
	}
	for i, want := range []orders.Status{orders.Paid, orders.Unpaid, orders.Unpaid, orders.Cancelled} {
		if got := b.status(t, ids[i]); got != want {
			t.Errorf("order %d is %s, want %s", ids[i], got, want)
		}
	}
	for _, want := range []string{"scanned           4\n", "cancelled         1 ", "already paid      1\n", "held              1\n", "parked            1\n"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the report has not %q:\n%s", want, stdout)
		}
	}
	if got := service.State(ids[3]); got != "closed" || service.Calls("close", 0) != 1 {
		t.Errorf("the cancelled order's page is %s, %d pages were closed; want its own alone", got, service.Calls("close", 0))
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE order_id = ? AND kind = 'reconciled'", ids[3]); n != 1 {
		t.Errorf("%d events say that reconcile cancelled it, want 1", n)
	}
}
