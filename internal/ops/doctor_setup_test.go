package ops

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
)

func TestMain(m *testing.M) {
	// The tests wait for messages and time limits most of the time: more of them at once than there are cores.
	flag.Parse()
	if err := flag.Set("test.parallel", "12"); err != nil {
		panic(err)
	}
	// A package of the official client's metrics library starts it in its init.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start"))
}

// look makes the checks whose names begin so, and gives the findings by name.
func look(t *testing.T, cfg DoctorConfig, prefixes ...string) map[string]Finding {
	t.Helper()
	var list []check
	for _, c := range checks {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(c.name, p) }) {
			list = append(list, c)
		}
	}
	if len(list) == 0 {
		t.Fatalf("no check begins with %v", prefixes)
	}
	begun := time.Now()
	findings, err := examine(t.Context(), cfg, list, nil)
	if err != nil {
		t.Fatal(err)
	}
	if took, limit := time.Since(begun), cfg.WithDefaults().Timeout+5*time.Second; took > limit {
		t.Errorf("the doctor took %s, want less than %s", took, limit)
	}
	found := map[string]Finding{}
	for _, f := range findings {
		found[f.Name] = f
	}
	return found
}

// wantWrong fails unless just these checks have found something wrong; each has to say the words in what it found or in what mends it.
func wantWrong(t *testing.T, findings map[string]Finding, want map[string]string) {
	t.Helper()
	for name, f := range findings {
		words, bad := want[name]
		switch {
		case bad && f.Verdict != Wrong:
			t.Errorf("%s is %s: %s; want it wrong", name, f.Verdict, f.Found)
		case bad && !strings.Contains(f.Found+" / "+f.Fix, words):
			t.Errorf("%s says %q and mends it by %q; want %q there", name, f.Found, f.Fix, words)
		case bad && f.Fix == "":
			t.Errorf("%s says %q, and not what mends it", name, f.Found)
		case !bad && f.Verdict == Wrong:
			t.Errorf("%s is wrong too: %s", name, f.Found)
		}
	}
	for name := range want {
		if _, made := findings[name]; !made {
			t.Errorf("%s was not checked", name)
		}
	}
}

func wantSound(t *testing.T, findings map[string]Finding, names ...string) {
	t.Helper()
	for _, name := range names {
		if f := findings[name]; f.Verdict != Sound {
			t.Errorf("%s is %q: %s; want it sound", name, f.Verdict, f.Found)
		}
	}
}

func wantNotChecked(t *testing.T, findings map[string]Finding, words string, names ...string) {
	t.Helper()
	for _, name := range names {
		if f := findings[name]; f.Verdict != NotChecked || !strings.Contains(f.Found+" / "+f.Fix, words) {
			t.Errorf("%s is %q: %s / %s; want it not checked, and %q", name, f.Verdict, f.Found, f.Fix, words)
		}
	}
}

// onDatabase is a configuration for a database of the test's own on the shared server, with one account for all roles.
func onDatabase(t *testing.T) (DoctorConfig, *mysqltest.DB) {
	t.Helper()
	db := mysqltest.New(t)
	return accounts(db.DSN), db
}

func accounts(dsn string) DoctorConfig {
	// No test depends on a quiet machine.
	cfg := DoctorConfig{Tick: 100 * time.Millisecond, MaxDelay: 23*time.Hour + 50*time.Minute, Timeout: time.Minute}
	for _, role := range []string{"api", "relay", "consume", "reconcile", "refund", "read", "migrate"} {
		cfg.Accounts = append(cfg.Accounts, Account{Role: role, Key: "mysql.dsn", DSN: dsn})
	}
	return cfg
}

// with changes a DSN.
func with(t *testing.T, dsn string, change func(*mysql.Config)) string {
	t.Helper()
	parsed, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if parsed.Params == nil {
		parsed.Params = map[string]string{}
	}
	change(parsed)
	return parsed.FormatDSN()
}

// account makes a user of the test's own with these grants, $DB standing for the database, and gives its DSN.
func account(t *testing.T, db *mysqltest.DB, grants ...string) string {
	t.Helper()
	var b [6]byte
	_, _ = rand.Read(b[:])
	user := "doctor_" + hex.EncodeToString(b[:])
	db.Exec(t, "CREATE USER '"+user+"'@'%' IDENTIFIED BY 'secret'")
	t.Cleanup(func() {
		admin, err := sql.Open("mysql", mysqltest.AdminDSN(t))
		if err == nil {
			_, err = admin.ExecContext(context.WithoutCancel(t.Context()), "DROP USER IF EXISTS '"+user+"'@'%'")
			_ = admin.Close()
		}
		if err != nil {
			t.Logf("left behind: %v", err)
		}
	})
	for _, g := range grants {
		db.Exec(t, "GRANT "+strings.ReplaceAll(g, "$DB", "`"+db.Name+"`")+" TO '"+user+"'@'%'")
	}
	return with(t, db.DSN, func(c *mysql.Config) { c.User, c.Passwd = user, "secret" })
}

// onBroker is a configuration for topics and groups of the test's own on a real broker.
func onRealBroker(t *testing.T, b *stacktest.Broker) DoctorConfig {
	t.Helper()
	group := b.NewGroup(t, leastRetries)
	cfg := DoctorConfig{
		RocketMQ: rmq.Config{Endpoints: b.Endpoints, TLS: rmq.TLS{Disabled: true}},
		Topic:    b.NewTopic(t, admin.Delay), Group: group,
		OwnTopic: b.NewTopic(t, admin.Delay), OwnGroup: b.NewGroup(t, leastRetries),
		Tick: 100 * time.Millisecond, MaxDelay: 23*time.Hour + 50*time.Minute,
	}
	reader(t, b, group, 1000)
	return cfg
}

// reader makes the group that reads the dead letters of another.
func reader(t *testing.T, b *stacktest.Broker, group string, retries int) {
	t.Helper()
	if err := b.Admin.CreateGroup(t.Context(), group+"-dlq", retries); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Admin.DeleteGroup(context.WithoutCancel(t.Context()), group+"-dlq"); err != nil {
			t.Logf("left behind: %v", err)
		}
	})
}

// onEmbedded is the same on the embedded endpoint.
func onEmbedded(t *testing.T, options ...lapsetest.Option) (DoctorConfig, *lapsetest.Broker) {
	t.Helper()
	b := lapsetest.Start(t, options...)
	b.CreateTopic("topic", lapsetest.Delay, 8)
	b.CreateTopic("own", lapsetest.Delay, 2)
	b.CreateGroup("group", leastRetries)
	b.CreateGroup("group-dlq", 1000)
	b.CreateGroup("own", leastRetries)
	return DoctorConfig{
		RocketMQ: rmq.Config{Endpoints: b.Endpoint(), TLS: rmq.TLS{Disabled: true}},
		Topic:    "topic", Group: "group", OwnTopic: "own", OwnGroup: "own",
		Tick: 100 * time.Millisecond, MaxDelay: 23*time.Hour + 50*time.Minute,
	}, b
}

// adminAddr is the remoting address of the shared broker.
func adminAddr(t *testing.T) string { return stacktest.Require(t, "LAPSE_TEST_BROKER_ADMIN") }

// proxy stands before a real database and changes what sessions ask for.
type proxy struct {
	server  string
	lis     net.Listener
	wg      sync.WaitGroup
	rewrite *strings.Replacer
	// reset makes it reset the session at the end of each transaction, as poolers do.
	reset bool

	mu    sync.Mutex
	conns []net.Conn // guarded by mu
}

// behind gives the DSN of the same database behind a proxy that rewrites statements, and resets sessions if it is told to.
func behind(t *testing.T, dsn string, reset bool, oldnew ...string) string {
	t.Helper()
	p := &proxy{rewrite: strings.NewReplacer(oldnew...), reset: reset}
	var err error
	if p.lis, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	out := with(t, dsn, func(c *mysql.Config) { p.server, c.Addr = c.Addr, p.lis.Addr().String() })
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = p.lis.Close()
		p.mu.Lock()
		for _, c := range p.conns {
			_ = c.Close()
		}
		p.mu.Unlock()
		p.wg.Wait()
	})
	return out
}

func (p *proxy) accept() {
	for {
		client, err := p.lis.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.server) //nolint:noctx // ended by the cleanup
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		var swallow atomic.Bool
		swallowed := make(chan struct{}, 1)
		end := func() { _ = client.Close(); _ = server.Close() }
		p.wg.Go(func() { defer end(); p.forward(client, server, &swallow, swallowed) })
		p.wg.Go(func() { defer end(); answer(server, client, &swallow, swallowed) })
	}
}

func packet(r io.Reader) ([]byte, error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32([]byte{head[0], head[1], head[2], 0})
	whole := append(head, make([]byte, size)...)
	_, err := io.ReadFull(r, whole[4:])
	return whole, err
}

func (p *proxy) forward(client, server net.Conn, swallow *atomic.Bool, swallowed <-chan struct{}) {
	const query, resetConnection = 0x03, 0x1f
	for {
		whole, err := packet(client)
		if err != nil {
			return
		}
		// Sequence number 0 begins a command; the packets of the handshake have higher ones.
		if whole[3] == 0 && len(whole) > 5 && whole[4] == query {
			text := p.rewrite.Replace(string(whole[5:]))
			whole = append(whole[:5:5], text...)
			binary.LittleEndian.PutUint32(whole, uint32(len(text)+1)) // the highest byte is the sequence number, 0
			if p.reset && text == "ROLLBACK" {
				swallow.Store(true)
				if _, err := server.Write([]byte{1, 0, 0, 0, resetConnection}); err != nil {
					return
				}
				<-swallowed
			}
		}
		if _, err := server.Write(whole); err != nil {
			return
		}
	}
}

// answer passes on what the server says, but for the answer to what the client has not asked.
func answer(server, client net.Conn, swallow *atomic.Bool, swallowed chan<- struct{}) {
	defer close(swallowed)
	for {
		whole, err := packet(server)
		if err != nil {
			return
		}
		if swallow.CompareAndSwap(true, false) {
			swallowed <- struct{}{}
			continue
		}
		if _, err := client.Write(whole); err != nil {
			return
		}
	}
}

// deaf is an address where connections are taken and nothing is ever said.
func deaf(t *testing.T) string {
	t.Helper()
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.Map
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			conns.Store(c, true)
		}
	})
	t.Cleanup(func() {
		_ = lis.Close()
		wg.Wait()
		conns.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
	})
	return lis.Addr().String()
}

// closed is an address where nothing listens.
func closed(t *testing.T) string {
	t.Helper()
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lis.Close() }()
	return lis.Addr().String()
}

func dsnAt(addr string) string { return fmt.Sprintf("lapse:secret@tcp(%s)/lapse", addr) }
