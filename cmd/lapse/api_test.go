package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/orders"
)

const testToken = "0123456789abcdef"

// apiEnviron is the configuration of an API with one token, on a port of its own.
func (b *bundle) apiEnviron(more ...string) []string {
	return b.environ(append([]string{"LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_API_TOKENS=shop place,pay,read " + testToken}, more...)...)
}

// apiAddr is where a process serves the API.
func (p *process) apiAddr(t *testing.T) string {
	t.Helper()
	var addr string
	eventually(t, "the API is served", func() bool {
		select {
		case <-p.done:
			t.Fatalf("the process has ended with %d; its log:\n%s", p.code, p.stderr)
		default:
		}
		entry, ok := p.line("serving api")
		addr, _ = entry["addr"].(string)
		return ok
	})
	return addr
}

// ask sends one request to the API and decodes the answer.
func (p *process) ask(t *testing.T, method, path, body string) (status int, answer map[string]any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+p.apiAddr(t)+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", fmt.Sprint(orders.NewID()))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(content, &answer); err != nil {
		t.Fatalf("%s %s: %d %s: %v", method, path, resp.StatusCode, content, err)
	}
	return resp.StatusCode, answer
}

// placeByHTTP places an order and gives its path.
func (p *process) placeByHTTP(t *testing.T, body string) string {
	t.Helper()
	status, o := p.ask(t, http.MethodPost, "/v1/orders", body)
	if status != http.StatusCreated {
		t.Fatalf("place: %d %v", status, o)
	}
	return fmt.Sprintf("/v1/orders/%s", o["id"])
}

// A small shop's one process: what is placed over HTTP is cancelled when its second is over, unless it is paid.
func TestAllInOneProcessCancelsWhatIsPlacedOverHTTPAndNotPaid(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	p := spawn(t, b.apiEnviron("LAPSE_RELAY_LINGER=10ms"), "all")
	p.ready(t)
	eventually(t, "every part is ready", func() bool {
		n, _ := p.metric(t, "lapse_ready", "")
		return n == 5
	})
	code, stdout, stderr := lapse(t, []string{"LAPSE_HTTP_ADDR=" + p.addr(t)}, "health", "all")
	if want := "database: ok\nbroker: ok\nrelay: ok\nconsumer: ok\napi: ok\n"; code != 0 || stdout != want {
		t.Errorf("health: exit code %d, stdout %q, stderr %q; want %q", code, stdout, stderr, want)
	}

	const order = `{"currency":"EUR","amount":"100","items":[{"sku":"pen","quantity":1,"price":"100"}],"timeout_seconds":1}`
	unpaid, paid := p.placeByHTTP(t, order), p.placeByHTTP(t, order)
	status, result := p.ask(t, http.MethodPost, paid+"/payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"100"}`)
	if status != http.StatusOK || result["outcome"] != "accepted" {
		t.Fatalf("pay: %d %v", status, result)
	}
	var o map[string]any
	eventually(t, "the unpaid order is cancelled", func() bool {
		_, o = p.ask(t, http.MethodGet, unpaid, "")
		return o["status"] == "cancelled"
	})
	if o["cancel_reason"] != "timeout" || o["cancelled_at"].(string) < o["deadline_at"].(string) {
		t.Errorf("the cancelled order is %v", o)
	}
	eventually(t, "the consumer has looked at both", func() bool {
		n, _ := p.metric(t, "lapse_outcomes_total", "")
		return n == 2
	})
	if _, o := p.ask(t, http.MethodGet, paid, ""); o["status"] != "paid" {
		t.Errorf("the paid order is %v", o)
	}
	if available, sold := b.db.Int(t, "SELECT available FROM stock"), b.db.Int(t, "SELECT sold FROM stock"); available != 999 || sold != 1 {
		t.Errorf("%d are available and %d sold, want 999 and 1", available, sold)
	}
	_, story := p.ask(t, http.MethodGet, unpaid+"/events", "")
	if events := fmt.Sprint(story["events"]); !strings.Contains(events, "kind:placed") || !strings.Contains(events, "kind:cancelled") {
		t.Errorf("the story is %v", story)
	}

	// One set of metrics, with those of every part.
	for name, want := range map[string]float64{"lapse_relay_sent_orders_total": 2, "lapse_orders_overdue": 0, "lapse_ready": 5, "lapse_relay_paused": 0, "lapse_consumer_paused": 0} {
		eventually(t, fmt.Sprintf("%s is %v", name, want), func() bool {
			got, found := p.metric(t, name, "")
			return found && got == want
		})
	}
	if n, _ := p.metric(t, "lapse_api_outcomes_total", `outcome="placed"`); n != 2 {
		t.Errorf("%v orders were placed by the metrics, want 2", n)
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
	if _, said := p.line("stopped"); !said || strings.Contains(p.stderr.String(), "database is closed") {
		t.Error("the end was not in order")
	}
	if strings.Contains(p.stderr.String(), testToken) {
		t.Error("the log has the token in it")
	}
}

// A checkout never waits for the broker, and so nothing may take its API away for the broker's sake.
func TestAllIsReadyForOrdersWithoutTheBroker(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := spawn(t, b.apiEnviron("LAPSE_ROCKETMQ_ENDPOINTS=127.0.0.1:1"), "all")
	p.ready(t)
	p.placeByHTTP(t, `{"currency":"EUR","amount":"100"}`)
	code, stdout, stderr := lapse(t, []string{"LAPSE_HTTP_ADDR=" + p.addr(t)}, "health", "all")
	if code != 0 || !strings.Contains(stdout, "database: ok\n") || !strings.Contains(stdout, "api: ok\n") || strings.Contains(stdout, "broker: ok") {
		t.Errorf("health: exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	for check, want := range map[string]float64{"broker": 0, "api": 1} {
		if n, _ := p.metric(t, "lapse_ready", `check="`+check+`"`); n != want {
			t.Errorf("lapse_ready of %s is %v, want %v", check, n, want)
		}
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
}

// What the API has taken is answered before the process ends, and what was placed in the last moment is sent by the next one.
func TestAStopOfAllAnswersWhatIsUnderWayAndLosesNoOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	p := spawn(t, b.apiEnviron("LAPSE_RELAY_LINGER=10ms"), "all")
	p.ready(t)
	addr := p.apiAddr(t)
	free := b.lock(t, "SELECT * FROM stock WHERE sku = 'pen' FOR UPDATE")
	var path string
	var asking sync.WaitGroup
	asking.Go(func() {
		path = p.placeByHTTP(t, `{"currency":"EUR","amount":"100","items":[{"sku":"pen","quantity":1,"price":"100"}],"timeout_seconds":1}`)
	})
	eventually(t, "the order waits for its stock", func() bool { return b.waiting(t, "UPDATE stock SET available%") == 1 })
	p.signal(syscall.SIGTERM)
	eventually(t, "the probes say that it stops", func() bool {
		_, body := p.get(t, "/readyz")
		return strings.Contains(body, "stopping")
	})
	eventually(t, "nothing is taken any more", func() bool {
		status, _ := get(t, "http://"+addr+"/openapi.yaml")
		return status == 0
	})
	free()
	asking.Wait()
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
	id, err := orders.ParseID(strings.TrimPrefix(path, "/v1/orders/"))
	if err != nil {
		t.Fatal(err)
	}
	spawn(t, b.apiEnviron("LAPSE_RELAY_LINGER=10ms"), "all")
	eventually(t, "the next process cancels it", func() bool { return b.status(t, id) == orders.Cancelled })
	b.cancelledOnce(t, id)
}

// The API alone needs no broker. It waits for its database as the others do, and its account needs no DELETE.
func TestTheAPIAloneNeedsTheDatabaseOnly(t *testing.T) {
	t.Parallel()
	b := setup(t)
	proxy := newProxy(t, b.db.DSN)
	secret := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(secret, []byte("# the shop\nshop place,pay,read "+testToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, environOf(proxy.dsn, closedAddr(t), "LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_API_TOKENS_FILE="+secret), "api")
	eventually(t, "it names what is missing", func() bool {
		status, body := p.get(t, "/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "connect to the database")
	})
	if status, answer := p.ask(t, http.MethodGet, "/v1/orders/1", ""); status != http.StatusServiceUnavailable || answer["type"] != "urn:lapse:problem:database-unavailable" {
		t.Errorf("without a database: %d %v", status, answer)
	}
	proxy.open()
	p.ready(t)
	path := p.placeByHTTP(t, `{"currency":"EUR","amount":"100"}`)
	if status, o := p.ask(t, http.MethodGet, path, ""); status != http.StatusOK || o["status"] != "unpaid" {
		t.Errorf("%d %v", status, o)
	}
	if n := b.broker.Calls(lapsetest.SendMessage); n != 0 {
		t.Errorf("the API has sent %d messages", n)
	}
	for _, metric := range []string{"lapse_api_requests_total", "lapse_api_request_duration_seconds_count", "lapse_api_requests_in_flight", "lapse_build_info", "lapse_orders_overdue"} {
		eventually(t, "there is the metric "+metric, func() bool {
			_, found := p.metric(t, metric, "")
			return found
		})
	}
	if status, _ := get(t, "http://"+p.apiAddr(t)+"/metrics"); status != http.StatusNotFound {
		t.Errorf("the API's own address answers %d for the metrics, want 404", status)
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("it ends with %d, want 0", code)
	}
}

func TestAnAddressOfTheAPIInUseIsNamedWithItsKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := start(t, b.apiEnviron(), "api")
	code, _, stderr := lapse(t, b.apiEnviron("LAPSE_API_ADDR="+first.apiAddr(t)), "api")
	if code != exitFailed || !strings.Contains(stderr, "api.addr") || !strings.Contains(stderr, "in use") {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
}

// The rights of deploy/mysql/users.sql are enough: the account of the stack's api works on a database that was migrated for it.
func TestTheAPIsAccountHasTheRightsThatItNeeds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	dsn := os.Getenv("LAPSE_MYSQL_DSN")
	if dsn == "" {
		t.Fatal(`LAPSE_MYSQL_DSN is not set: eval "$(scripts/stack env)"`)
	}
	own := dsn[:strings.LastIndex(dsn, "/")+1] + b.db.Name
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('pen', 1000, 0, 0)")
	p := start(t, environOf(own, closedAddr(t), "LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_API_TOKENS=shop place,pay,read "+testToken), "api")
	p.ready(t)
	path := p.placeByHTTP(t, `{"currency":"EUR","amount":"100","items":[{"sku":"pen","quantity":1,"price":"100"}]}`)
	for _, req := range [][2]string{
		{"/extend", `{"deadline_at":"` + time.Now().UTC().Add(time.Hour).Format(time.RFC3339) + `"}`},
		{"/payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"200"}`},
		{"/payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"200"}`},
	} {
		if status, answer := p.ask(t, http.MethodPost, path+req[0], req[1]); status != http.StatusOK {
			t.Errorf("%s: %d %v", req[0], status, answer)
		}
	}
	if status, answer := p.ask(t, http.MethodPost, path+"/payments", `{"gateway":"bank","transaction_id":"T","currency":"EUR","amount":"100"}`); status != http.StatusConflict {
		t.Errorf("a contradicting notice: %d %v", status, answer)
	}
	path = p.placeByHTTP(t, `{"currency":"EUR","amount":"100","items":[{"sku":"pen","quantity":1,"price":"100"}]}`)
	if status, answer := p.ask(t, http.MethodPost, path+"/cancel", `{"reason":"x"}`); status != http.StatusOK {
		t.Errorf("cancel: %d %v", status, answer)
	}
}

func TestTheRelayForgetsOldKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO idempotency_keys (idempotency_key, request_hash, order_id, created_at) VALUES ('old', REPEAT('x', 32), 1, UTC_TIMESTAMP(3) - INTERVAL 2 HOUR), ('new', REPEAT('x', 32), 2, UTC_TIMESTAMP(3))")
	p := start(t, b.environ("LAPSE_ORDERS_KEY_RETENTION=1h", "LAPSE_RELAY_PURGE_INTERVAL=20ms", "LAPSE_RELAY_PURGE_BATCH=1"), "relay")
	eventually(t, "the old key is gone", func() bool {
		_, said := p.line("purged idempotency keys")
		return said && b.db.Text(t, "SELECT GROUP_CONCAT(idempotency_key) FROM idempotency_keys") == "new"
	})
}
