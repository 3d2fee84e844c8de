package orders_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// case JOB-4
func TestOrderIsDueFromItsDeadlineOnToTheMillisecond(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ages := map[time.Duration]bool{ // since placing, with a timeout of 30 minutes
		-5 * time.Minute: false, 0: false, 29*time.Minute + 59*time.Second: false, 30*time.Minute - time.Millisecond: false,
		30 * time.Minute: true, 30*time.Minute + time.Millisecond: true, 30*time.Minute + time.Second: true, 2 * time.Hour: true,
	}
	judge := b.on(b.at(noon, orders.Config{}))
	for age, due := range ages {
		o := b.on(b.at(noon.Add(-age), orders.Config{})).place()
		if want := noon.Add(30*time.Minute - age); !o.DeadlineAt.Equal(want) {
			t.Errorf("aged %s: deadline %s, want %s", age, o.DeadlineAt, want)
		}
		out := judge.cancelDue(o.ID)[0]
		if (out.Result == orders.ResultCancelled) != due {
			t.Errorf("aged %s: %+v", age, out)
		}
		if due && out.Lateness != age-30*time.Minute || !due && out.Remaining != 30*time.Minute-age {
			t.Errorf("aged %s: %+v", age, out)
		}
		if got, ok := judge.get(o.ID).Lateness(); ok != due || due && got != out.Lateness {
			t.Errorf("aged %s: stored lateness %s", age, got)
		}
	}
	judge.wantClean()
}

// case DB-10
func TestDeadlineIsStoredToTheMillisecondAndNeverRoundedUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, at := range []time.Time{
		time.Date(2027, 1, 15, 10, 0, 0, 600e6, time.UTC), time.Date(2027, 1, 15, 23, 59, 59, 600e6, time.UTC), time.Date(2027, 12, 31, 23, 59, 59, 999e6, time.UTC),
		time.Date(2028, 2, 29, 0, 0, 0, 0, time.UTC),
	} {
		o := b.on(b.at(at, orders.Config{})).place()
		if !o.CreatedAt.Equal(at) || !o.DeadlineAt.Equal(at.Add(30*time.Minute)) {
			t.Errorf("placed at %s: created %s, deadline %s", at, o.CreatedAt, o.DeadlineAt)
		}
		if got := b.db.Text(t, "SELECT CONCAT_WS(' ', o.created_at, o.deadline_at, b.deliver_at) FROM orders o JOIN outbox b ON b.order_id = o.id WHERE o.id = ?", o.ID); got !=
			fmt.Sprintf("%s %s %[2]s", sqlText(at), sqlText(at.Add(30*time.Minute))) {
			t.Errorf("placed at %s, stored as %s", at, got)
		}
		early, due := b.on(b.at(at.Add(30*time.Minute-time.Millisecond), orders.Config{})), b.on(b.at(at.Add(30*time.Minute), orders.Config{}))
		if out := early.cancelDue(o.ID)[0]; out.Result != orders.ResultNotDue || out.Remaining != time.Millisecond {
			t.Errorf("a millisecond early: %+v", out)
		}
		if out := due.cancelDue(o.ID)[0]; out.Result != orders.ResultCancelled {
			t.Errorf("at the deadline: %+v", out)
		}
	}
	// A deadline of the caller's with finer fractions is cut, as the promise on the page was.
	fine := noon.Add(time.Hour + 999*time.Microsecond + 999)
	o := b.on(b.at(noon, orders.Config{})).place(func(n *orders.NewOrder) { n.DeadlineAt = fine.In(time.FixedZone("CST", 8*3600)) })
	if !o.DeadlineAt.Equal(noon.Add(time.Hour)) || !b.get(o.ID).DeadlineAt.Equal(*o.DeadlineAt) {
		t.Errorf("deadline %s, stored %s", o.DeadlineAt, b.get(o.ID).DeadlineAt)
	}
}

// case DB-13
func TestYear2038(t *testing.T) {
	t.Parallel()
	b := setup(t)
	eve := time.Date(2038, 1, 19, 3, 0, 0, 0, time.UTC)
	o := b.on(b.at(eve, orders.Config{})).place()
	if want := eve.Add(30 * time.Minute); !o.DeadlineAt.Equal(want) || !b.get(o.ID).DeadlineAt.Equal(want) {
		t.Errorf("deadline %s, want %s", o.DeadlineAt, want)
	}
	if out := b.on(b.at(eve.Add(14*time.Minute), orders.Config{})).cancelDue(o.ID)[0]; out.Result != orders.ResultNotDue || out.Remaining != 16*time.Minute {
		t.Errorf("%+v", out)
	}
	// Neither server lets a session's clock be set beyond the 32 bits, so the question for the time is answered on the way.
	p := newProxy(t, b.db.DSN)
	p.rewrite = strings.NewReplacer("UTC_TIMESTAMP(3)", "TIMESTAMP'"+sqlText(eve.Add(time.Hour))+"'")
	store, err := orders.Open(p.dsn, orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	after := b.on(store)
	next := after.place()
	if want := eve.Add(90 * time.Minute); !next.DeadlineAt.Equal(want) || !next.CreatedAt.Equal(eve.Add(time.Hour)) {
		t.Errorf("placed after it: created %s, deadline %s", next.CreatedAt, next.DeadlineAt)
	}
	if out := after.cancelDue(o.ID)[0]; out.Result != orders.ResultCancelled || out.Lateness != 30*time.Minute {
		t.Errorf("%+v", out)
	}
	after.wantClean()
}

// TestProcessClockZoneDoesNotMatter: invariant I5. The process may be a month off, and anywhere in the world.
func TestProcessClockZoneDoesNotMatter(t *testing.T) {
	t.Parallel()
	if os.Getenv("LAPSE_TEST_ZONE_CHILD") != "" {
		zoneChild(t)
		return
	}
	b := setup(t)
	o := b.on(b.at(noon, orders.Config{})).place()
	want := fmt.Sprintf("created 2027-01-15T12:00:00.123Z deadline 2027-01-15T12:30:00.123Z result not_due %s", 30*time.Minute)
	for _, zone := range []string{"UTC", "Asia/Shanghai", "America/St_Johns", "Pacific/Kiritimati"} {
		child := exec.CommandContext(b.ctx, os.Args[0], "-test.run=^TestProcessClockZoneDoesNotMatter$", "-test.v") //nolint:gosec // this very test
		child.Env = append(os.Environ(), "TZ="+zone, "LAPSE_TEST_ZONE_CHILD="+b.db.DSN, fmt.Sprintf("LAPSE_TEST_ZONE_ORDER=%d", o.ID))
		out, err := child.CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("TZ=%s: %v, want %q in\n%s", zone, err, want, out)
		}
	}
}

func zoneChild(t *testing.T) {
	store, err := orders.Open(os.Getenv("LAPSE_TEST_ZONE_CHILD")+"?parseTime=true&loc=Local&timestamp="+stopped(noon), orders.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	id, err := orders.ParseID(os.Getenv("LAPSE_TEST_ZONE_ORDER"))
	if err != nil {
		t.Fatal(err)
	}
	o, err := store.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	out, err := store.CancelDue(t.Context(), text(id))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("created %s deadline %s result %s %s\n", o.CreatedAt.Format(time.RFC3339Nano), o.DeadlineAt.Format(time.RFC3339Nano), out[0].Result, out[0].Remaining)
}

// case CFG-6, PAY-6
func TestDeadlineOfAnOpenOrderIsTheOneItWasPromised(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old := b.on(b.at(noon, orders.Config{})).place()
	own := b.on(b.at(noon, orders.Config{})).place(func(n *orders.NewOrder) { n.Timeout = 2 * time.Hour })
	later := orders.Config{Timeout: 45 * time.Minute}
	fresh := b.on(b.at(noon, later)).place()
	for _, c := range []struct {
		minutes int
		want    []orders.Result
	}{
		{30, []orders.Result{orders.ResultCancelled, orders.ResultNotDue, orders.ResultNotDue}},
		{45, []orders.Result{orders.ResultAlreadyCancelled, orders.ResultCancelled, orders.ResultNotDue}},
		{119, []orders.Result{orders.ResultAlreadyCancelled, orders.ResultAlreadyCancelled, orders.ResultNotDue}},
		{120, []orders.Result{orders.ResultAlreadyCancelled, orders.ResultAlreadyCancelled, orders.ResultCancelled}},
	} {
		out := b.on(b.at(noon.Add(time.Duration(c.minutes)*time.Minute), later)).cancelDue(old.ID, fresh.ID, own.ID)
		got := []orders.Result{out[0].Result, out[1].Result, out[2].Result}
		if !slices.Equal(got, c.want) {
			t.Errorf("after %d minutes: %v, want %v", c.minutes, got, c.want)
		}
	}
	row, there, err := b.store.Outbox(b.ctx, old.ID)
	if err != nil || !there || !row.DeliverAt.Equal(*old.DeadlineAt) {
		t.Errorf("its message is due %s, its deadline is %s (%v)", row.DeliverAt, old.DeadlineAt, err)
	}
}

// case PAY-7
func TestChannelWithoutDeadlineIsLeftAlone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, orders.Config{}))
	var ids []int64
	var want []orders.Result
	for channel, exempt := range map[string]bool{"web": false, "store-api": false, "admin": true, "invoice": true} {
		o := b.place(func(n *orders.NewOrder) {
			n.Channel = channel
			if n.NoDeadline = exempt; !exempt {
				n.DeadlineAt = noon
			}
		})
		ids = append(ids, o.ID)
		want = append(want, map[bool]orders.Result{true: orders.ResultExempt, false: orders.ResultCancelled}[exempt])
	}
	for i, out := range b.cancelDue(ids...) {
		if out.Result != want[i] {
			t.Errorf("%s: %s, want %s", b.get(ids[i]).Channel, out.Result, want[i])
		}
	}
	b.wantClean()
}

func TestOrderThatCannotBePlacedIsRefusedByName(t *testing.T) {
	t.Parallel()
	b := setup(t)
	before := b.counts()
	long := strings.Repeat("茶", 65)
	line := func(sku string, quantity, price int64) []orders.Item {
		return []orders.Item{{SKU: sku, Quantity: quantity, Price: price}}
	}
	many := make([]orders.Item, 501)
	for i := range many {
		many[i] = orders.Item{SKU: fmt.Sprint(i), Quantity: 1}
	}
	for says, n := range map[string]orders.NewOrder{
		"order id -1":          {ID: -1, Currency: "EUR"},
		"amount -1":            {Amount: -1, Currency: "EUR"},
		"currency is empty":    {},
		`currency " EUR"`:      {Currency: " EUR"},
		"more than 16":         {Currency: "EURO EURO EURO EURO"},
		`channel "web "`:       {Channel: "web ", Currency: "EUR"},
		"control character":    {Channel: "w\x00b", Currency: "EUR"},
		"not valid UTF-8":      {UserID: "\xff", Currency: "EUR"},
		"more than 64":         {UserID: long, Currency: "EUR"},
		"timeout -1s":          {Timeout: -time.Second, Currency: "EUR"},
		"both a timeout":       {Timeout: time.Second, DeadlineAt: time.Now(), Currency: "EUR"},
		"without deadline":     {NoDeadline: true, Timeout: time.Second, Currency: "EUR"},
		"before 1970":          {DeadlineAt: time.Date(1969, 12, 31, 0, 0, 0, 0, time.UTC), Currency: "EUR"},
		"max_lifetime":         {Timeout: 169 * time.Hour, Currency: "EUR"},
		"later than":           {DeadlineAt: time.Date(12026, 1, 1, 0, 0, 0, 0, time.UTC), Currency: "EUR"},
		"sku is empty":         {Currency: "EUR", Items: line("", 1, 1)},
		"quantity 0":           {Currency: "EUR", Items: line("a", 0, 1)},
		"quantity -1":          {Currency: "EUR", Items: line("a", -1, 1)},
		"price -1":             {Currency: "EUR", Items: line("a", 1, -1)},
		"prices 1 and 2":       {Currency: "EUR", Items: append(line("a", 1, 1), line("a", 1, 2)...)},
		"add up to more":       {Currency: "EUR", Items: append(line("a", math.MaxInt64, 1), line("a", 1, 1)...)},
		"501 SKUs":             {Currency: "EUR", Items: many},
		"more than 1000000000": {Currency: "EUR", Items: line("a", 1_000_000_001, 1)},
		"of \"a\" add up":      {Currency: "EUR", Items: append(line("a", 1_000_000_000, 1), line("a", 1, 1)...)},
		"not ASCII":            {Currency: "EUR", Traceparent: "é"},
		"traceparent":          {Currency: "EUR", Traceparent: strings.Repeat("x", 65)},
	} {
		_, err := b.store.Place(b.ctx, n)
		if !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("want %q, got %v", says, err)
		}
	}
	if after := b.counts(); after != before {
		t.Errorf("something was written\n %s\n %s", before, after)
	}
	for _, p := range []orders.Payment{
		{}, {Gateway: "g", TransactionID: "t", OrderID: 1, Currency: "EUR"}, {Gateway: "g", TransactionID: "t", OrderID: 1, Currency: "EUR", Amount: -1},
		{Gateway: "g ", TransactionID: "t", OrderID: 1, Currency: "EUR", Amount: 1}, {Gateway: "g", TransactionID: long, OrderID: 1, Currency: "EUR", Amount: 1},
		{Gateway: "g", TransactionID: "t", OrderID: 0, Currency: "EUR", Amount: 1}, {Gateway: "g", TransactionID: "t", OrderID: 1, Currency: "", Amount: 1},
		{Gateway: "g", TransactionID: "t", OrderID: 1, Currency: "EUR", Amount: 1, PaidAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)},
		{Gateway: "g", TransactionID: "t", OrderID: 1, Currency: "EUR", Amount: 1, PaidAt: time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("EST", -5*3600))},
	} {
		if _, err := b.store.RecordPayment(b.ctx, p); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("%+v: %v", p, err)
		}
	}
	o := b.place()
	for _, reason := range []string{"", " ", "timeout", "Timeout", " TIMEOUT "} {
		if _, err := b.store.Cancel(b.ctx, o.ID, "u1", reason); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("reason %q: %v", reason, err)
		}
	}
	if _, err := b.store.Cancel(b.ctx, o.ID, "", "why not"); !errors.Is(err, orders.ErrInvalid) {
		t.Errorf("no actor: %v", err)
	}
}

// case DB-15
func TestIDsBeyond53BitsAreExact(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const paid, due = 9007199254740992, 9007199254740993
	b = b.on(b.at(noon, orders.Config{}))
	for _, id := range []int64{paid, due, due + 1, 1, math.MaxInt64} {
		b.place(func(n *orders.NewOrder) { n.ID, n.DeadlineAt = id, noon.Add(-time.Second) })
	}
	b.pay(paid)
	out, err := b.store.CancelDue(b.ctx, []string{"9007199254740993"})
	if err != nil || out[0].ID != "9007199254740993" || out[0].Result != orders.ResultCancelled {
		t.Errorf("%+v, %v", out, err)
	}
	if got := b.db.Text(t, "SELECT GROUP_CONCAT(CONCAT(id, ' ', status) ORDER BY id SEPARATOR ', ') FROM orders"); got !=
		"1 unpaid, 9007199254740992 paid, 9007199254740993 cancelled, 9007199254740994 unpaid, 9223372036854775807 unpaid" {
		t.Error(got)
	}
	if out := b.cancelDue(math.MaxInt64, 1); out[0].ID != "9223372036854775807" || out[0].Result != orders.ResultCancelled || out[1].ID != "1" {
		t.Errorf("%+v", out)
	}
	body, err := json.Marshal(b.get(due))
	if err != nil || !strings.Contains(string(body), `"id":"9007199254740993"`) || !strings.Contains(string(body), `"amount":"1000"`) {
		t.Errorf("%s, %v", body, err)
	}
	var back orders.Order
	if err := json.Unmarshal(body, &back); err != nil || back.ID != due {
		t.Errorf("%d, %v", back.ID, err)
	}
	body, err = json.Marshal(orders.Violation{OrderID: due})
	if err != nil || !strings.Contains(string(body), `"9007199254740993"`) {
		t.Errorf("%s, %v", body, err)
	}
	b.wantClean()
}

// case DB-14, MQ-12
func TestOneOrderHasOneSpelling(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.place(overdue, func(n *orders.NewOrder) { n.ID = 42 })
	for _, bad := range []string{"", "0", "-1", "+42", "042", " 42", "42 ", "42abc", "4_2", "0x2a", "1e3", "42.0", "４２", "9223372036854775808", "99999999999999999999", "\xff42", strings.Repeat("9", 300)} {
		if _, err := orders.ParseID(bad); !errors.Is(err, orders.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	asked := []string{"42abc", " 42", "042", "-1", "9223372036854775808", strings.Repeat("9", 300), "\xff42"}
	out, err := b.store.CancelDue(b.ctx, asked)
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range out {
		if o.ID != asked[i] || o.Result != orders.ResultInvalid {
			t.Errorf("%q: %+v", asked[i], o)
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM parked WHERE what = 'order'"); n != int64(len(asked)) {
		t.Errorf("%d ids are parked, want %d", n, len(asked))
	}
	if b.get(42).Status != orders.Unpaid {
		t.Error("another spelling cancelled 42")
	}
	// The good ones in between are done, repeated ones once, in the order they were asked for.
	more := []string{"7", "42", "x", "42", "7"}
	out, err = b.store.CancelDue(b.ctx, more)
	if err != nil {
		t.Fatal(err)
	}
	want := []orders.Result{orders.ResultNotFound, orders.ResultCancelled, orders.ResultInvalid, orders.ResultAlreadyCancelled, orders.ResultNotFound}
	for i, o := range out {
		if o.ID != more[i] || o.Result != want[i] {
			t.Errorf("%d: %+v, want %s %s", i, o, more[i], want[i])
		}
	}
	if out, err := b.store.CancelDue(b.ctx, nil); err != nil || len(out) != 0 {
		t.Errorf("nothing asked: %+v, %v", out, err)
	}
}

func TestMoreThanOneBatchOfIDs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := make([]int64, 1203)
	for i := range ids {
		ids[len(ids)-1-i] = int64(i + 1)
	}
	b.db.Exec(t, `INSERT INTO orders (id, channel, user_id, currency, amount, status, deadline_at, created_at)
		SELECT a.n + 10 * b.n + 100 * c.n + 1000 * d.n + 1, '', '', 'EUR', 1, 'unpaid', '2026-01-01', '2026-01-01' FROM `+digits("a")+", "+digits("b")+", "+digits("c")+", "+digits("d")+
		" WHERE a.n + 10 * b.n + 100 * c.n + 1000 * d.n < 1200")
	out := b.cancelDue(ids...)
	for i, o := range out {
		want := orders.ResultCancelled
		if ids[i] > 1200 {
			want = orders.ResultNotFound
		}
		if o.ID != fmt.Sprint(ids[i]) || o.Result != want {
			t.Fatalf("%d: %+v, want %d %s", i, o, ids[i], want)
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE kind = 'cancelled'"); n != 1200 {
		t.Errorf("%d cancelled events", n)
	}
}

// digits is a table of the numbers 0 to 9, as both servers take it.
func digits(alias string) string {
	return "(SELECT 0 AS n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9) " + alias
}

func TestNewIDsRiseAndAreUniqueAcrossGoroutines(t *testing.T) {
	t.Parallel()
	const workers, each = 8, 20_000
	lists := make([][]int64, workers)
	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			for range each {
				lists[w] = append(lists[w], orders.NewID())
			}
		})
	}
	work.Wait()
	seen := make(map[int64]bool, workers*each)
	for _, list := range lists {
		if !slices.IsSorted(list) {
			t.Error("the ids of one goroutine do not rise")
		}
		for _, id := range list {
			if id <= 0 || seen[id] {
				t.Fatalf("id %d", id)
			}
			seen[id] = true
		}
	}
	before := orders.NewID()
	if again, err := orders.ParseID(orders.FormatID(before)); err != nil || again != before {
		t.Errorf("%d became %d, %v", before, again, err)
	}
}

// TestIDThatIsTakenIsDrawnAgain: processes share nothing, so two may draw the same id. The trigger stands for the other process, which
// has taken whatever comes first.
func TestIDThatIsTakenIsDrawnAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.stock("tea", 10)
	b.db.Exec(t, "CREATE TABLE taken (id BIGINT PRIMARY KEY)")
	b.db.Exec(t, `CREATE TRIGGER taken BEFORE INSERT ON orders FOR EACH ROW
		BEGIN IF @refused IS NULL OR @refused < 2 THEN SET @refused = COALESCE(@refused, 0) + 1; INSERT INTO taken VALUES (1), (1); END IF; END`)
	o := b.place(items(orders.Item{SKU: "tea", Quantity: 1, Price: 1}))
	if got := b.get(o.ID); got.ID != o.ID || len(got.Items) != 1 {
		t.Errorf("%+v", got)
	}
	b.wantStock("tea", 9, 1, 0)
	b.wantClean()
}
