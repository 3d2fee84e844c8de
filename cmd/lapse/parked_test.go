package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// accounts are the stack's accounts for what is changed by hand and for what is only read, on the bundle's database: the rights of
// deploy/mysql/users.sql have to be enough.
func (b *bundle) accounts(t *testing.T) []string {
	t.Helper()
	var environ []string
	for _, name := range []string{"LAPSE_MYSQL_DSN", "LAPSE_MYSQL_DSN_READ"} {
		dsn := os.Getenv(name)
		if dsn == "" {
			t.Fatalf(`%s is not set: eval "$(scripts/stack env)"`, name)
		}
		environ = append(environ, name+"="+dsn[:strings.LastIndex(dsn, "/")+1]+b.db.Name)
	}
	return append(environ, "USER=ann")
}

// says runs a command that must end with the code, and gives what it prints.
func says(t *testing.T, environ []string, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	got, stdout, stderr := lapse(t, environ, args...)
	if got != code {
		t.Errorf("%v: exit code %d, want %d\n%s%s", args, got, code, stdout, stderr)
	}
	return stdout, stderr
}

func (b *bundle) park(t *testing.T, p orders.Parked) string {
	t.Helper()
	if err := b.store.Park(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return strconv.FormatInt(b.db.Int(t, "SELECT id FROM parked WHERE what = ? AND ref = ?", p.What, p.Ref), 10)
}

func expiryOf(t *testing.T, ids ...int64) []byte {
	t.Helper()
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = orders.FormatID(id)
	}
	body, err := orders.EncodeExpiry(orders.Expiry{Due: time.Now().Truncate(time.Millisecond), Orders: texts})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestWhatIsParkedIsListedShownRetriedAndDiscarded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	environ := b.accounts(t)
	if out, _ := says(t, environ, 0, "parked", "list"); out != "nothing here\n" {
		t.Errorf("an empty list is %q", out)
	}
	overdue := b.place(t, orders.NewOrder{Amount: 5, DeadlineAt: time.Now().Add(-time.Hour)}).ID
	other := b.place(t, orders.NewOrder{Amount: 5, DeadlineAt: time.Now().Add(-time.Hour)}).ID
	paid := b.place(t, orders.NewOrder{Amount: 5}).ID
	if _, err := b.store.RecordPayment(t.Context(), orders.Payment{Gateway: "bank", TransactionID: "T", OrderID: paid, Currency: "EUR", Amount: 5}); err != nil {
		t.Fatal(err)
	}
	order := b.park(t, orders.Parked{What: orders.ParkedOrder, Ref: orders.FormatID(overdue), Reason: "cancelling it failed:\x1b[2J out of range"})
	message := b.park(t, orders.Parked{What: orders.ParkedMessage, Ref: "01AB", Reason: "dead letter", Body: expiryOf(t, other, paid, 77)})
	binary := b.park(t, orders.Parked{What: orders.ParkedMessage, Ref: "01AC", Reason: "cannot be read", Body: []byte("\xff\x00\x1b[2J" + strings.Repeat("x", 2000))})

	out, _ := says(t, environ, 0, "parked", "list")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[0], "ID  WHAT ") || !strings.Contains(lines[1], "01AC") || !strings.HasSuffix(lines[3], `cancelling it failed:\x1b[2J out of range`) {
		t.Errorf("the list is\n%s", out)
	}
	if out, _ := says(t, environ, 0, "parked", "list", "--what", "message", "--since", "1h", "--match", "DEAD"); !strings.Contains(out, "01AB") || strings.Count(out, "\n") != 2 {
		t.Errorf("the chosen are\n%s", out)
	}
	if out, _ := says(t, environ, 0, "parked", "list", "--since", "2099-01-01"); out != "nothing here\n" {
		t.Errorf("parked in the future are\n%s", out)
	}
	var page struct {
		Parked []struct{ ID int64 }
		After  int64
	}
	out, _ = says(t, environ, 0, "parked", "list", "--limit", "2", "--json")
	if err := json.Unmarshal([]byte(out), &page); err != nil || len(page.Parked) != 2 || page.After != page.Parked[1].ID || fmt.Sprint(page.After) != message {
		t.Errorf("the first page is %s, %v", out, err)
	}
	if out, _ := says(t, environ, 0, "parked", "list", "--limit", "2"); !strings.HasSuffix(out, "there are more: add --after "+message+", or raise --limit\n") {
		t.Errorf("the first page is\n%s", out)
	}
	if out, _ := says(t, environ, 0, "parked", "list", "--after", message); strings.Count(out, "\n") != 2 || !strings.Contains(out, orders.FormatID(overdue)) {
		t.Errorf("the second page is\n%s", out)
	}

	if out, _ := says(t, environ, 0, "parked", "show", message); !strings.Contains(out, fmt.Sprintf("orders   %d, %d, 77\n", other, paid)) || !strings.Contains(out, `{"v":1,"due":`) {
		t.Errorf("the message is shown as\n%s", out)
	}
	out, _ = says(t, environ, 0, "parked", "show", binary)
	if !strings.Contains(out, "body     2006 bytes, the first 1024 in hexadecimal; --json has all\n00000000  ff 00 1b 5b") || strings.Contains(out, "\x1b") {
		t.Errorf("the binary body is shown as\n%s", out)
	}
	var shown struct {
		Body       *string
		BodyBase64 string `json:"body_base64"`
	}
	out, _ = says(t, environ, 0, "parked", "show", binary, "--json")
	if err := json.Unmarshal([]byte(out), &shown); err != nil || shown.Body != nil {
		t.Errorf("the binary body as JSON is %s, %v", out, err)
	} else if body, err := base64.StdEncoding.DecodeString(shown.BodyBase64); err != nil || len(body) != 2006 || body[0] != 0xff {
		t.Errorf("%d bytes, %v", len(body), err)
	}

	out, stderr := says(t, environ, 1, "parked", "retry", binary, message, "999")
	if want := message + " (message 01AB): 1 order given back to the relay, 1 order left alone, being paid or cancelled, 1 order not there\n"; out != want {
		t.Errorf("the retry says %q, want %q", out, want)
	}
	if !strings.Contains(stderr, "a retry cannot help: the message cannot be read") || !strings.Contains(stderr, "retry parked 999: nothing parked has this id") || !strings.HasSuffix(stderr, "lapse: 2 of 3 were not retried\n") {
		t.Errorf("the retry complains %q", stderr)
	}
	if out, _ := says(t, environ, 0, "parked", "retry", message); !strings.HasSuffix(out, " UTC by cli:ann; nothing changed\n") {
		t.Errorf("a second retry says %q", out)
	}
	if out, _ := says(t, environ, 0, "parked", "discard", binary, "--reason", `ticket "812"`, "--actor", "bob"); out != binary+" (message 01AC): discarded\n" {
		t.Errorf("the discard says %q", out)
	}
	if got := b.db.Text(t, "SELECT CONCAT_WS('|', state, handled_by, handled_reason) FROM parked WHERE id = ?", binary); got != `discarded|bob|ticket "812"` {
		t.Errorf("discarded is %s", got)
	}
	if _, stderr := says(t, environ, 2, "parked", "retry", "--all"); !strings.Contains(stderr, "that would retry 1; say --yes") {
		t.Errorf("--all without --yes says %q", stderr)
	}
	if out, _ := says(t, environ, 0, "parked", "retry", "--all", "--yes"); out != order+" (order "+orders.FormatID(overdue)+"): given back to the relay\n1 retried\n" {
		t.Errorf("--all says %q", out)
	}
	if got := b.db.Int(t, "SELECT COUNT(*) FROM parked WHERE state = 'parked'"); got != 0 {
		t.Errorf("%d are parked", got)
	}
	if got := b.db.Int(t, "SELECT COUNT(*) FROM outbox WHERE state = 'pending' AND order_id IN (?, ?)", overdue, other); got != 2 {
		t.Errorf("%d outbox rows wait, want 2", got)
	}
}

func TestTablesOfAnOlderVersionAreNamedWithWhatToDo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	says(t, b.environ(), 0, "migrate", "down", "--to", "39", "--yes")
	for _, args := range [][]string{{"parked", "list"}, {"parked", "show", "1"}} {
		if _, stderr := says(t, b.environ(), 3, args...); !strings.Contains(stderr, `run "lapse migrate up"`) {
			t.Errorf("%v: %q", args, stderr)
		}
	}
	says(t, b.environ(), 0, "migrate", "down", "--to", "0", "--yes")
	if _, stderr := says(t, b.environ(), 3, "why", "1"); !strings.Contains(stderr, `run "lapse migrate up"`) {
		t.Errorf("why: %q", stderr)
	}
}

func TestAllThatIsChosenIsHandledAlsoBeyondAPage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	environ := b.accounts(t)
	var values []string
	for i := range pageSize + 20 {
		values = append(values, fmt.Sprintf("('message', 'm%d', 'cannot be read', 1, '2026-01-01', '2026-01-01', 'parked')", i))
	}
	b.db.Exec(t, "INSERT INTO parked (what, ref, reason, times, first_at, last_at, state) VALUES "+strings.Join(values, ","))
	kept := b.park(t, orders.Parked{What: orders.ParkedMessage, Ref: "other", Reason: "another reason"})
	out, stderr := says(t, environ, 1, "parked", "retry", "--all", "--match", "cannot be read", "--yes", "--json")
	var results []struct {
		Done  bool
		Error string
	}
	if err := json.Unmarshal([]byte(out), &results); err != nil || len(results) != pageSize+20 || results[0].Done || !strings.Contains(results[0].Error, "has no body") {
		t.Errorf("%d results, %v, the first %+v", len(results), err, results[:1])
	}
	if want := fmt.Sprintf("lapse: %d of %d were not retried\n", pageSize+20, pageSize+20); stderr != want {
		t.Errorf("it ends with %q, want %q", stderr, want)
	}
	out, _ = says(t, environ, 0, "parked", "discard", "--all", "--match", "cannot be read", "--reason", "a broken producer", "--yes")
	if !strings.HasSuffix(out, fmt.Sprintf("\n%d discarded\n", pageSize+20)) {
		t.Errorf("the discard ends with %q", out[max(len(out)-80, 0):])
	}
	if got := b.db.Text(t, "SELECT GROUP_CONCAT(id) FROM parked WHERE state = 'parked'"); got != kept {
		t.Errorf("parked are %s, want %s alone", got, kept)
	}
}

func TestParkedRefusesWhatItCannotUnderstand(t *testing.T) {
	t.Parallel()
	environ := []string{"LAPSE_MYSQL_DSN=u:s3cr3t@tcp(" + closedAddr(t) + ")/shop"}
	for _, tc := range []struct {
		code int
		says string
		args string
	}{
		{2, "say which: lapse parked", "parked"},
		{2, `there is no command "parked lits"; did you mean "list"?`, "parked lits"},
		{2, `--what "shop": it is order, message or payment`, "parked list --what shop"},
		{2, `--state "lost"`, "parked list --state lost"},
		{2, `--since "yesterday"`, "parked list --since yesterday"},
		{2, "--limit 0", "parked list --limit 0"},
		{2, "ID is missing", "parked show"},
		{2, `"x" is no id`, "parked show x"},
		{2, `"0" is no id`, "parked retry 0"},
		{2, "give the ids", "parked retry"},
		{2, "not both", "parked retry 1 --all"},
		{2, "choose among --all", "parked retry 1 --what order"},
		{2, "discard needs --reason", "parked discard 1"},
		{2, "ORDER is missing", "why"},
		{2, `order id "012"`, "why 012"},
		{3, "connect", "parked list"},
		{3, "connect", "parked show 1"},
		{3, "connect", "parked retry 1"},
		{3, "connect", "parked discard 1 --reason x"},
		{3, "connect", "why 12"},
	} {
		stdout, stderr := says(t, environ, tc.code, strings.Fields(tc.args)...)
		if !strings.Contains(stderr, tc.says) || stdout != "" || strings.Contains(stderr, "s3cr3t") {
			t.Errorf("%s: %q %q, want %q", tc.args, stdout, stderr, tc.says)
		}
	}
}

// An order that the broker refused is cancelled after a retry, by the services and no other way, and its story says so.
func TestARetriedOrderGoesThroughRelayBrokerAndConsumer(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.placeWithStock(t, 1, time.Millisecond)[0]
	claim, err := b.store.ClaimOutbox(t.Context(), 10, time.Minute)
	if err != nil || len(claim.Rows) != 1 {
		t.Fatal(claim, err)
	}
	if n, err := b.store.MarkParked(t.Context(), claim.Token, []int64{id}, "code 40012: message too large"); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	environ := append(b.environ("LAPSE_RELAY_LINGER=10ms"), "USER=ann")
	why := func(code int) (answer struct{ Cause, Answer, Next string }) {
		t.Helper()
		out, _ := says(t, environ, code, "why", orders.FormatID(id), "--json")
		if err := json.Unmarshal([]byte(out), &answer); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		return answer
	}
	parked := b.db.Text(t, "SELECT id FROM parked")
	if a := why(0); a.Cause != "parked" || !strings.Contains(a.Answer, "because code 40012: message too large") || !strings.Contains(a.Next, "lapse parked retry "+parked) {
		t.Errorf("before the retry: %+v", a)
	}
	start(t, environ, "relay").ready(t)
	start(t, environ, "consume").ready(t)
	if got := b.status(t, id); got != orders.Unpaid {
		t.Fatalf("a parked order is %s before its retry", got)
	}
	if out, _ := says(t, environ, 0, "parked", "retry", parked); !strings.HasSuffix(out, "given back to the relay\n") {
		t.Errorf("the retry says %q", out)
	}
	eventually(t, "the order is cancelled", func() bool { return b.status(t, id) == orders.Cancelled })
	b.cancelledOnce(t, id)
	if a := why(0); a.Cause != "cancelled_by_message" || a.Next != "" {
		t.Errorf("after the retry: %+v", a)
	}
	out, _ := says(t, environ, 0, "why", orders.FormatID(id))
	for _, want := range []string{"Cancelled by timeout on ", "order " + orders.FormatID(id) + ": cancelled, 0 EUR (minor units)\nas of ", "  placed     checkout  ", "  parked     lapse     parked: code 40012", "  retried    cli:ann   ", "  sent       relay     timed message "} {
		if !strings.Contains(out, want) {
			t.Errorf("the story does not say %q:\n%s", want, out)
		}
	}
}

func TestWhyIsTheSameOnTheCommandLineAndOverHTTPForTheAccountThatReads(t *testing.T) {
	t.Parallel()
	b := setup(t)
	environ := b.accounts(t)
	id := b.place(t, orders.NewOrder{Amount: 5, Channel: "web"}).ID
	if _, err := b.store.Cancel(t.Context(), id, "ann", "asked \x1b]0;by\a phone"); err != nil {
		t.Fatal(err)
	}
	text, _ := says(t, environ, 0, "why", orders.FormatID(id))
	if !strings.HasPrefix(text, "Cancelled by hand on ") || !strings.Contains(text, `"asked \x1b]0;by\a phone".`) || strings.Contains(text, "\x1b") {
		t.Errorf("it says\n%s", text)
	}
	out, _ := says(t, environ, 0, "why", orders.FormatID(id), "--json")
	p := start(t, b.environ("LAPSE_API_ADDR=127.0.0.1:0"), "api")
	_, overHTTP := get(t, "http://"+p.apiAddr(t)+"/v1/orders/"+orders.FormatID(id)+"/why")
	var one, two map[string]any
	if err := json.Unmarshal([]byte(out), &one); err != nil {
		t.Fatal(out, err)
	}
	if err := json.Unmarshal([]byte(overHTTP), &two); err != nil {
		t.Fatal(overHTTP, err)
	}
	delete(one, "at")
	delete(two, "at")
	// What lies ahead says for how long.
	if a, b := fmt.Sprint(one["order"], one["cause"], one["answer"]), fmt.Sprint(two["order"], two["cause"], two["answer"]); a != b || one["cause"] != "cancelled_by_hand" {
		t.Errorf("the command line says\n%s\nthe API\n%s", a, b)
	}

	stdout, stderr := says(t, environ, 1, "why", "77")
	if stdout != "" || stderr != "lapse: there is no order 77\n" {
		t.Errorf("of no order: %q %q", stdout, stderr)
	}
	b.park(t, orders.Parked{What: orders.ParkedOrder, Ref: "77", Reason: "a timed message names it"})
	if stdout, _ = says(t, environ, 1, "why", "77"); !strings.Contains(stdout, "There is no order 77; something named it, and it is parked since ") {
		t.Errorf("of no order that is parked: %q", stdout)
	}
	stdout, _ = says(t, environ, 1, "why", "77", "--json")
	if err := json.Unmarshal([]byte(stdout), &one); err != nil || one["cause"] != "not_found" {
		t.Errorf("of no order, as JSON: %q, %v", stdout, err)
	}
}
