package stacktest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
)

// Require returns the value of an environment variable that `scripts/stack env` prints. Without it the test is skipped, saying how to get it;
// but with LAPSE_TEST_REQUIRE_STACK=1 it fails, so that a green `make test` cannot mean "skipped".
func Require(t testing.TB, name string) string {
	t.Helper()
	if v := os.Getenv(name); v != "" {
		return v
	}
	const how = `scripts/stack up --with replica && eval "$(scripts/stack env)"`
	if os.Getenv("LAPSE_TEST_REQUIRE_STACK") == "1" {
		t.Fatalf("needs the stack, and %s is not set: %s", name, how)
	}
	t.Skipf("needs the stack (%s is not set): %s", name, how)
	return ""
}

// Broker is a real RocketMQ 5 broker on which a test makes topics and groups of its own. Its parallel subtests may share it.
type Broker struct {
	Endpoints string // of the gRPC proxy, host:port; plaintext
	Admin     *admin.Client

	mu     sync.Mutex
	topics []string // guarded by mu
}

// Shared returns the broker of the shared stack, or skips or fails the test as Require does.
func Shared(t testing.TB) *Broker {
	t.Helper()
	var nameServers []string
	if addr := os.Getenv("LAPSE_TEST_NAMESRV_ADMIN"); addr != "" { // servers in containers
		nameServers = []string{addr}
	}
	return &Broker{
		Endpoints: Require(t, "LAPSE_ROCKETMQ_ENDPOINTS"),
		Admin:     admin.New(Require(t, "LAPSE_TEST_BROKER_ADMIN"), nameServers...),
	}
}

// NewTopic creates a topic of the type with 8 queues and a name of the test's own, usable at once. It is deleted when the test ends.
func (b *Broker) NewTopic(t testing.TB, kind admin.TopicType) string {
	t.Helper()
	name := uniqueName(t)
	if err := b.Admin.CreateTopic(t.Context(), name, kind, 8); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	b.topics = append(b.topics, name)
	b.mu.Unlock()
	t.Cleanup(func() { b.clean(t, func(ctx context.Context) error { return b.Admin.DeleteTopic(ctx, name) }) })
	return name
}

// NewGroup creates a consumer group with a name of the test's own: a message is delivered retries+1 times, then it goes to the dead-letter
// topic. The group is deleted when the test ends, with the retry and dead-letter topics that the broker made for it.
func (b *Broker) NewGroup(t testing.TB, retries int) string {
	t.Helper()
	name := uniqueName(t)
	if err := b.Admin.CreateGroup(t.Context(), name, retries); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.clean(t, func(ctx context.Context) error {
			b.mu.Lock()
			topics := slices.Clone(b.topics)
			b.mu.Unlock()
			for _, topic := range topics {
				if err := b.Admin.DeleteTopic(ctx, "%RETRY%"+name+"_"+topic); err != nil {
					return err
				}
			}
			for _, topic := range []string{"%RETRY%" + name, "%DLQ%" + name} {
				if err := b.Admin.DeleteTopic(ctx, topic); err != nil {
					return err
				}
			}
			return b.Admin.DeleteGroup(ctx, name)
		})
	})
	return name
}

// clean removes something at the end of a test. The test's own context has ended by then, and the broker may be one that the test has
// stopped: what cannot be removed is said and left.
func (b *Broker) clean(t testing.TB, remove func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := remove(ctx); err != nil {
		t.Logf("left behind: %v", err)
	}
}

var notInNames = regexp.MustCompile(`[^A-Za-z0-9_-]+`)

// uniqueName makes a name that RocketMQ takes and that tells, in the broker's log, which test it belongs to.
func uniqueName(t testing.TB) string {
	var random [6]byte
	if _, err := rand.Read(random[:]); err != nil {
		t.Fatal(err)
	}
	name := strings.Trim(notInNames.ReplaceAllString(t.Name(), "-"), "-")
	if len(name) > 60 {
		name = name[:60]
	}
	return fmt.Sprintf("%s-%s", name, hex.EncodeToString(random[:]))
}
