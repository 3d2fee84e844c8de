//go:build !race

package lapsetest_test

import (
	"strings"
	"testing"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"

	"github.com/lapse-orders/lapse/lapsetest"
)

// Not under the race detector: a Start that fails writes and reads the client's
// startUpError without a lock (client.go:123,600).

func TestOfficialConsumerOfAnUnknownGroupDoesNotStart(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	b.CreateTopic("t", lapsetest.Delay, 1)
	c, err := golang.NewSimpleConsumer(
		&golang.Config{Endpoint: b.Endpoint(), ConsumerGroup: "misspelt", Credentials: &credentials.SessionCredentials{}},
		golang.WithSimpleAwaitDuration(5*time.Second),
		golang.WithSimpleSubscriptionExpressions(map[string]*golang.FilterExpression{"t": golang.SUB_ALL}))
	if err != nil {
		t.Fatalf("new consumer: %v", err)
	}
	if err := c.Start(); err == nil || !strings.Contains(err.Error(), "group not found: misspelt") {
		t.Errorf("start: %v, want: group not found", err)
	}
}
