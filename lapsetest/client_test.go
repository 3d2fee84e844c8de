package lapsetest_test

import (
	"testing"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

func startProducer(t *testing.T, endpoint string, topics ...string) golang.Producer {
	t.Helper()
	return startSignedProducer(t, endpoint, "", "", topics...)
}

func startSignedProducer(t *testing.T, endpoint, key, secret string, topics ...string) golang.Producer {
	t.Helper()
	p, err := golang.NewProducer(
		&golang.Config{Endpoint: endpoint, Credentials: &credentials.SessionCredentials{AccessKey: key, AccessSecret: secret}},
		golang.WithTopics(topics...), golang.WithMaxAttempts(1))
	if err != nil {
		t.Fatalf("new producer: %v", err)
	}
	if err := p.Start(); err != nil {
		t.Fatalf("start producer: %v", err)
	}
	t.Cleanup(func() {
		if err := p.GracefulStop(); err != nil {
			t.Errorf("stop producer: %v", err)
		}
	})
	return p
}

func startConsumer(t *testing.T, endpoint, group, topic string) golang.SimpleConsumer {
	t.Helper()
	c, err := golang.NewSimpleConsumer(
		&golang.Config{Endpoint: endpoint, ConsumerGroup: group, Credentials: &credentials.SessionCredentials{}},
		golang.WithSimpleAwaitDuration(5*time.Second),
		golang.WithSimpleSubscriptionExpressions(map[string]*golang.FilterExpression{topic: golang.SUB_ALL}))
	if err != nil {
		t.Fatalf("new consumer: %v", err)
	}
	if err := c.Start(); err != nil {
		t.Fatalf("start consumer: %v", err)
	}
	t.Cleanup(func() {
		if err := c.GracefulStop(); err != nil {
			t.Errorf("stop consumer: %v", err)
		}
	})
	return c
}
